// checksum_avx512: folding with carry-less multiplication, 256 bytes in each turn.
//
//     [ 256 bytes held | next 256 bytes | ... ]      held = held * x^2048 + next, as remainders: 16 times 128 bits side
//     by side
//
// Each 128 bits are multiplied in halves: low * x^(2048 + 64) + high * x^2048, by constants that allow for the bits
// that run backwards (a product of two 64-bit halves is 127 bits long, and x^33 is put into each). What is held at the
// end is a message of 256 bytes with the same remainder, which the loop of SSE4.2 takes with whatever is left.
//
// Compiled for AVX-512 and VPCLMULQDQ, called only where they are there.

#include <immintrin.h>
#include <string.h>

#include "checksum.h"

static const uint64_t HELD = 256;   // bytes
static const uint64_t AHEAD = 2048; // bytes that are fetched early: a processor's own prefetcher stops at each page

// The remainder of x^n as a factor of 64-bit halves: shifted by one bit, since products are one short.
static constexpr uint64_t factor(uint64_t n) { return (uint64_t)tm_crc_power(n) << 1; }

static inline __m512i fold(__m512i held, __m512i factors, __m512i next) {
    const __m512i low = _mm512_clmulepi64_epi128(held, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(held, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); // the sum of three
}

uint32_t tm_crc_avx512(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    if (bytes < 2 * HELD)
        return tm_crc_sse42(crc, data, bytes);
    constexpr uint64_t LOW = factor(8 * HELD + 32), HIGH = factor(8 * HELD - 32);
    const __m512i factors = _mm512_set_epi64(HIGH, LOW, HIGH, LOW, HIGH, LOW, HIGH, LOW);
    __m512i held[4];
    for (int i = 0; i < 4; ++i)
        held[i] = _mm512_loadu_si512(data + 64 * i);
    held[0] = _mm512_xor_si512(held[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (data += HELD, bytes -= HELD; bytes >= HELD; data += HELD, bytes -= HELD)
        for (int i = 0; i < 4; ++i) {
            __builtin_prefetch(data + AHEAD + 64 * i);
            held[i] = fold(held[i], factors, _mm512_loadu_si512(data + 64 * i));
        }
    uint8_t message[HELD];
    memcpy(message, held, HELD);
    return tm_crc_sse42(tm_crc_sse42(0, message, HELD), data, bytes);
}
