// The part of DLPack's C interface (major version 1) that reads a tensor in place, and makes one.
//
// Declared here, as the tables' layout is a stable ABI and no header of it is installed with every
// torch. Source: the DLPack specification, https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace dure::dlpack {

constexpr int32_t kCpu = 1;
constexpr uint32_t kMajor = 1;

enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Version {
    uint32_t major, minor;
};

struct Tensor {
    void* data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

struct Managed {
    Version version;
    void* owner;
    void (*end)(Managed* self);
    uint64_t flags;
    Tensor tensor;
};

struct ExchangeApi {
    Version version;
    ExchangeApi* previous;
    void* allocator;
    void* managed_from_object;
    // 0, and the object, which has the tensor from then on; or -1 with a Python error set.
    int (*object_of)(Managed* tensor, void** out);
    // 0, or -1 with a Python error set.
    int (*describe)(void* object, Tensor* out);
    void* current_stream;
};

}  // namespace dure::dlpack
