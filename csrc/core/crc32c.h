// CRC-32C: a checksum that any 1 to 3 changed bits, and any burst of 32, change for certain.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dure {

// The sum of the bytes whose first part has the sum `before`, followed by `data`; of nothing: 0.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The same without the processor's instruction.
uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t before = 0);

// Whether `crc32c` may use the instruction where the processor has it (it may at first).
void allow_crc32c_instruction(bool allowed);

}  // namespace dure
