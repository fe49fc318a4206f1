// checksum_lanes: three stretches of a message at once, for processors with an instruction that takes eight bytes.
//
//     [      lane 0      |      lane 1      |      lane 2      ]     three remainders that do not wait for each other
//     crc = ((lane 0 shifted by a lane) ^ lane 1) shifted by a lane ^ lane 2
//
// The instruction takes three cycles and one can start in each, so that one lane alone would run at a third of the
// speed. To shift is to append zeros: four look-ups in a table for one length. Everything is static: each file that
// includes this is compiled for a processor of its own.
#ifndef TIERMEM_CHECKSUM_LANES_H
#define TIERMEM_CHECKSUM_LANES_H

#include <string.h>

#include "checksum.h"

namespace {

const uint64_t LANE = 2048; // bytes, a multiple of 8

struct ShiftTable {
    uint32_t of[4][256]; // by byte of the remainder, and its value
    constexpr ShiftTable() : of() {
        const uint32_t power = tm_crc_power(8 * LANE);
        for (int byte = 0; byte < 4; ++byte)
            for (uint32_t value = 0; value < 256; ++value)
                of[byte][value] = tm_crc_multiply(value << (8 * byte), power);
    }
};

inline uint32_t shift(const ShiftTable &table, uint32_t crc) {
    return table.of[0][crc & 255] ^ table.of[1][crc >> 8 & 255] ^ table.of[2][crc >> 16 & 255] ^ table.of[3][crc >> 24];
}

inline uint64_t eight_bytes(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

// take8, take1: the processor's instructions, (remainder, data) -> remainder.
template <typename Take8, typename Take1>
inline uint32_t run_lanes(uint32_t crc, const uint8_t *data, uint64_t bytes, Take8 take8, Take1 take1) {
    static constexpr ShiftTable table;
    for (; bytes >= 3 * LANE; bytes -= 3 * LANE, data += 3 * LANE) {
        uint32_t lanes[3] = {crc, 0, 0};
        for (uint64_t i = 0; i < LANE; i += 8)
            for (int lane = 0; lane < 3; ++lane)
                lanes[lane] = take8(lanes[lane], eight_bytes(data + (uint64_t)lane * LANE + i));
        crc = shift(table, shift(table, lanes[0]) ^ lanes[1]) ^ lanes[2];
    }
    for (; bytes >= 8; bytes -= 8, data += 8)
        crc = take8(crc, eight_bytes(data));
    for (; bytes; --bytes, ++data)
        crc = take1(crc, *data);
    return crc;
}

} // namespace

#endif
