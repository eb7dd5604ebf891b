// CRC-32C: the polynomial of Castagnoli, bits reflected, begun with ones and inverted at the end,
// as in RFC 3720 (iSCSI), appendix B.4. Within this file a *state* is what is inverted at the end.
//
// SSE4.2 has an instruction that takes 8 bytes. Its result is there after 3 cycles, and one can
// begin in each. So a run of bytes is cut into three *lanes* that are summed side by side, the
// first from the state so far, the others from zero. Then states are joined: that of a lane is
// moved past as many bytes of zeros as the next lane has, and the next lane's is added (exclusive
// or). Moving is linear in the bits of the state, so for a fixed number of bytes it is a look-up
// for each of its four bytes.
#include "crc32c.h"

#include <array>
#include <cstring>

namespace dure {

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

using Table = std::array<uint32_t, 256>;

// Entry i of table k is the state i moved past k + 1 bytes of zeros.
constexpr std::array<Table, 8> make_tables() {
    std::array<Table, 8> tables{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t state = i;
        for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ (state & 1 ? kPolynomial : 0);
        tables[0][i] = state;
    }
    for (size_t k = 1; k < 8; k++)
        for (size_t i = 0; i < 256; i++) {
            const uint32_t state = tables[k - 1][i];
            tables[k][i] = (state >> 8) ^ tables[0][state & 0xFF];
        }
    return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

uint64_t word_at(const unsigned char* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

uint32_t state_by_tables(uint32_t state, const unsigned char* data, size_t bytes) {
    for (; bytes >= 8; data += 8, bytes -= 8) {
        const uint64_t word = word_at(data) ^ state;
        state = 0;
        for (size_t k = 0; k < 8; k++) state ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    }
    for (; bytes > 0; data++, bytes--) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xFF];
    return state;
}

#if defined(__x86_64__)

// Moves states past a number of bytes of zeros.
class Past {
  public:
    explicit Past(size_t bytes) {
        for (size_t byte = 0; byte < 4; byte++)
            for (uint32_t i = 0; i < 256; i++) {
                uint32_t state = i << (8 * byte);
                for (size_t n = 0; n < bytes; n++) state = (state >> 8) ^ kTables[0][state & 0xFF];
                tables_[byte][i] = state;
            }
    }

    uint32_t operator()(uint32_t state) const {
        return tables_[0][state & 0xFF] ^ tables_[1][(state >> 8) & 0xFF] ^
               tables_[2][(state >> 16) & 0xFF] ^ tables_[3][state >> 24];
    }

  private:
    std::array<Table, 4> tables_;
};

struct Run {
    const unsigned char* data;
    size_t bytes;
};

// Sum what there is of three lanes of this length each, as often as it is there.
[[gnu::target("sse4.2")]]
uint32_t state_of_lanes(uint32_t state, Run& run, size_t lane, const Past& past) {
    for (; run.bytes >= 3 * lane; run.data += 3 * lane, run.bytes -= 3 * lane) {
        uint64_t first = state, second = 0, third = 0;
        for (const unsigned char* at = run.data; at < run.data + lane; at += 8) {
            first = __builtin_ia32_crc32di(first, word_at(at));
            second = __builtin_ia32_crc32di(second, word_at(at + lane));
            third = __builtin_ia32_crc32di(third, word_at(at + 2 * lane));
        }
        state = past(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
        state = past(state) ^ static_cast<uint32_t>(third);
    }
    return state;
}

[[gnu::target("sse4.2")]]
uint32_t state_by_instruction(uint32_t state, const unsigned char* data, size_t bytes) {
    constexpr size_t kLong = 4096, kShort = 256;
    static const Past past_long(kLong), past_short(kShort);
    Run run{data, bytes};
    state = state_of_lanes(state, run, kLong, past_long);
    state = state_of_lanes(state, run, kShort, past_short);
    uint64_t rest = state;
    for (; run.bytes >= 8; run.data += 8, run.bytes -= 8)
        rest = __builtin_ia32_crc32di(rest, word_at(run.data));
    state = static_cast<uint32_t>(rest);
    for (; run.bytes > 0; run.data++, run.bytes--) state = __builtin_ia32_crc32qi(state, *run.data);
    return state;
}

#endif

bool may_use_instruction = true;

}  // namespace

uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t before) {
    return ~state_by_tables(~before, static_cast<const unsigned char*>(data), bytes);
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction && may_use_instruction)
        return ~state_by_instruction(~before, static_cast<const unsigned char*>(data), bytes);
#endif
    return crc32c_by_tables(data, bytes, before);
}

void allow_crc32c_instruction(bool allowed) { may_use_instruction = allowed; }

}  // namespace dure
