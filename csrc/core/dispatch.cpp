// Which of the compiled kernels this machine can run.
#include <cstring>

#include "crc32c.h"
#include "kernels.h"

namespace dure {

namespace generic {
ReduceFn find(DType from, DType into, Reduction reduction);
}
#if defined(DURE_X86_KERNELS)
namespace avx2 {
ReduceFn find(DType from, DType into, Reduction reduction);
}
namespace avx512 {
ReduceFn find(DType from, DType into, Reduction reduction);
}
#endif

namespace {

struct Isa {
    const char* name;
    ReduceFn (*find)(DType, DType, Reduction);
};

const char kGeneric[] = "generic";

bool runs(const char* isa) {
    if (std::strcmp(isa, kGeneric) == 0) return true;
#if defined(DURE_X86_KERNELS)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (std::strcmp(isa, "avx2") == 0) return avx2;
    if (std::strcmp(isa, "avx512") == 0) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    }
#endif
    return false;
}

// Best first. Other machines know the names, and have none of them.
constexpr Isa kIsas[] = {
#if defined(DURE_X86_KERNELS)
    {"avx512", avx512::find},
    {"avx2", avx2::find},
#else
    {"avx512", nullptr},
    {"avx2", nullptr},
#endif
    {kGeneric, generic::find},
};

// The best that this machine runs of `most` and those behind it.
const Isa* best(const Isa* most) {
    while (!runs(most->name)) most++;
    return most;
}

const Isa* chosen = best(kIsas);

}  // namespace

ReduceFn reduce_kernel(DType dtype, Reduction reduction) {
    return chosen->find(dtype, dtype, reduction);
}

ReduceFn reduce_kernel(DType from, DType into, Reduction reduction) {
    return chosen->find(from, into, reduction);
}

const char* kernel_isa() { return chosen->name; }

bool select_kernel_isa(const char* name) {
    for (const Isa& isa : kIsas) {
        if (std::strcmp(isa.name, name) == 0 && runs(name)) {
            chosen = &isa;
            return true;
        }
    }
    return false;
}

bool limit_isa(const char* most) {
    for (const Isa& isa : kIsas) {
        if (std::strcmp(isa.name, most) != 0) continue;
        chosen = best(&isa);
        allow_crc32c_instruction(std::strcmp(most, kGeneric) != 0);
        return true;
    }
    return false;
}

}  // namespace dure
