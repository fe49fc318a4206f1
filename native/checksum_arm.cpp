// checksum_arm: with the CRC-32C instructions of ARMv8. Compiled for them, called only where they are there.

#include <arm_acle.h>

#include "checksum_lanes.h"

uint32_t tm_crc_arm(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    const auto take8 = [](uint32_t so_far, uint64_t word) { return __crc32cd(so_far, word); };
    const auto take1 = [](uint32_t so_far, uint8_t byte) { return __crc32cb(so_far, byte); };
    return run_lanes(crc, data, bytes, take8, take1);
}
