// checksum: CRC-32C loops, one for each way a processor helps, and the arithmetic that they share.
//
// A CRC is the remainder of the message, taken as a polynomial over GF(2), on division by
//
//     x^32 + x^28 + x^27 + x^26 + x^25 + x^23 + x^22 + x^20 + x^19 + x^18 + x^14 + x^13 + x^11 + x^10 + x^9 + x^8 + x^6
//     + 1
//
// Bits run backwards in it: the highest bit of a remainder is the coefficient of x^0. Sources: Castagnoli et al. 1993;
// RFC 3720 (iSCSI), appendix B.4; Gopal et al. 2009 (Intel), on folding with carry-less multiplication.
#ifndef TIERMEM_CHECKSUM_H
#define TIERMEM_CHECKSUM_H

#include <stdint.h>

#define TM_CRC_POLYNOMIAL 0x82F63B78u

// Goes on from a remainder, without the inversions before and behind.
typedef uint32_t (*tm_crc_loop)(uint32_t crc, const uint8_t *data, uint64_t bytes);

uint32_t tm_crc_plain(uint32_t crc, const uint8_t *data, uint64_t bytes);
#if defined(__x86_64__)
uint32_t tm_crc_sse42(uint32_t crc, const uint8_t *data, uint64_t bytes);
uint32_t tm_crc_avx512(uint32_t crc, const uint8_t *data, uint64_t bytes);
#elif defined(__aarch64__)
uint32_t tm_crc_arm(uint32_t crc, const uint8_t *data, uint64_t bytes);
#endif

// The loops that this processor can run, the best one last; `names` beside. Returns how many: 1 to 3.
int tm_crc_loops(tm_crc_loop *loops, const char **names);

// The remainder of a * b; 0x80000000 is 1.
static inline constexpr uint32_t tm_crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int i = 0; i < 32; ++i) {
        product ^= (a >> 31) ? b : 0;
        a <<= 1;
        b = (b >> 1) ^ ((b & 1) ? TM_CRC_POLYNOMIAL : 0);
    }
    return product;
}

// The remainder of x^n.
static inline constexpr uint32_t tm_crc_power(uint64_t n) {
    uint32_t power = 0x80000000u, square = 0x40000000u; // 1 and x
    for (; n; n >>= 1) {
        if (n & 1)
            power = tm_crc_multiply(power, square);
        square = tm_crc_multiply(square, square);
    }
    return power;
}

#endif
