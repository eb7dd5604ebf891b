// CRC-32C: published sums, and the instruction against the tables at every length and cut.
#include "crc32c.h"
#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

using Bytes = std::vector<unsigned char>;
using Sum = uint32_t (*)(const void*, size_t, uint32_t);

// RFC 3720, appendix B.4; and the sum of "123456789", by which such algorithms are catalogued.
void published_sums(Sum sum) {
    Bytes rising(32), falling(32);
    for (size_t i = 0; i < 32; i++) {
        rising[i] = static_cast<unsigned char>(i);
        falling[i] = static_cast<unsigned char>(31 - i);
    }
    CHECK(sum("", 0, 0) == 0);
    CHECK(sum(Bytes(32, 0x00).data(), 32, 0) == 0x8A9136AA);
    CHECK(sum(Bytes(32, 0xFF).data(), 32, 0) == 0x62A8AB43);
    CHECK(sum(rising.data(), 32, 0) == 0x46DD794E);
    CHECK(sum(falling.data(), 32, 0) == 0x113FDB5C);
    CHECK(sum("123456789", 9, 0) == 0xE3069283);
}

Bytes mixed(size_t count) {
    Bytes data(count);
    uint64_t state = 1;
    for (unsigned char& byte : data) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        byte = static_cast<unsigned char>(state >> 56);
    }
    return data;
}

TEST(published_sums_are_found) {
    published_sums(crc32c);
    published_sums(crc32c_by_tables);
}

TEST(instruction_and_tables_agree) {
    const Bytes data = mixed(40000);
    for (size_t count = 0; count < 2000; count++)
        CHECK(crc32c(data.data() + 1, count) == crc32c_by_tables(data.data() + 1, count));
    for (size_t count = 12000; count <= 39999; count += 613)
        CHECK(crc32c(data.data() + 1, count) == crc32c_by_tables(data.data() + 1, count));
}

TEST(parts_add_up) {
    const Bytes data = mixed(30000);
    const uint32_t whole = crc32c(data.data(), data.size());
    for (size_t cut = 0; cut <= data.size(); cut += 777) {
        const uint32_t first = crc32c(data.data(), cut);
        CHECK(crc32c(data.data() + cut, data.size() - cut, first) == whole);
        CHECK(crc32c_by_tables(data.data() + cut, data.size() - cut, first) == whole);
    }
}

}  // namespace
}  // namespace dure
