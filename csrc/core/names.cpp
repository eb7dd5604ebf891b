// Names of the codes, for texts of errors.
#include "types.h"

namespace dure {

namespace {

struct DTypeRow {
    const char* name;
    size_t bytes;
};

constexpr DTypeRow kDTypes[] = {
    {"float64", 8},        {"float32", 4},     {"float16", 2},         {"bfloat16", 2},
    {"float8_e4m3fn", 1},  {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1}, {"int8", 1},        {"int16", 2},           {"int32", 4},
    {"int64", 8},          {"uint8", 1},       {"uint16", 2},          {"uint32", 4},
    {"uint64", 8},         {"bool", 1},        {"complex32", 4},       {"complex64", 8},
    {"complex128", 16},
};
static_assert(sizeof(kDTypes) / sizeof(kDTypes[0]) == kReducibleDTypes);

constexpr const char* kReductionNames[] = {"SUM",  "AVG", "PRODUCT", "MIN", "MAX",
                                           "BAND", "BOR", "BXOR",    "",    "PREMUL_SUM"};

constexpr const char* kOpNames[] = {"none",
                                    "barrier",
                                    "broadcast",
                                    "all_reduce",
                                    "reduce",
                                    "all_gather",
                                    "gather",
                                    "scatter",
                                    "reduce_scatter",
                                    "all_to_all",
                                    "host_shared_empty",
                                    "send",
                                    "recv",
                                    "new_group"};

}  // namespace

size_t item_bytes(DType dtype) {
    auto i = static_cast<size_t>(dtype);
    return i < kReducibleDTypes ? kDTypes[i].bytes : 1;
}

const char* name_of(DType dtype) {
    auto i = static_cast<size_t>(dtype);
    return i < kReducibleDTypes ? kDTypes[i].name : "opaque";
}

const char* name_of(Reduction reduction) {
    auto i = static_cast<size_t>(reduction);
    return i < kReductions ? kReductionNames[i] : "?";
}

const char* name_of(Op op) {
    auto i = static_cast<size_t>(op);
    return i < sizeof(kOpNames) / sizeof(kOpNames[0]) ? kOpNames[i] : "?";
}

size_t whole_characters(const std::string& text, size_t most) {
    if (text.size() <= most) return text.size();
    while (most > 0 && (text[most] & 0xC0) == 0x80) most--;
    return most;
}

}  // namespace dure
