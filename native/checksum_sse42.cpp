// checksum_sse42: with the CRC-32C instruction of SSE4.2. Compiled for it, called only where it is there.

#include <nmmintrin.h>

#include "checksum_lanes.h"

uint32_t tm_crc_sse42(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    const auto take8 = [](uint32_t so_far, uint64_t word) { return (uint32_t)_mm_crc32_u64(so_far, word); };
    const auto take1 = [](uint32_t so_far, uint8_t byte) { return _mm_crc32_u8(so_far, byte); };
    return run_lanes(crc, data, bytes, take8, take1);
}
