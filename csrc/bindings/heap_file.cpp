// The one function that is called without Python's import: a zygote, which forks ranks that may
// not want Dure, finds it by name (`launch/ranks/forking.py`).
#include "heap_file.h"

extern "C" __attribute__((visibility("default"))) int64_t dure_move_heap(int fd) {
    return dure::move_heap(fd);
}
