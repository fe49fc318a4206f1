// rounding: which random words stochastic rounding uses.
//
//     word(step, part, element) = hash(key, part, element) + step * stride(part)          modulo 2^32
//
// and a number is rounded away from zero when the word's upper bits are below the share that is cut off. Over elements
// the hash is uniform, hence no bias. Over steps the word of one element walks round the circle by an irrational stride
// (Weyl's sequence; the strides are fractions of quadratic irrationals), which meets every interval as often as its
// length says, to within a few steps. Independent words would add their errors up like a random walk: an average of a
// thousand steps (beta2 = 0.999), or a master that integrates small updates, forgets so slowly that the walk is what
// one sees. With strides the error of a bf16 master was about half of that with independent words, in mean square, over
// 2,000 steps of Adam on noisy gradients; v's was a quarter smaller. Strides differ between parts, so that two parts of
// an element are not rounded alike for long.
//
// One hash serves two parts: its upper 16 bits the one, its lower 16, shifted up, the other. Only the upper 16 bits of
// a word are therefore random from element to element, which is all that bf16 cuts off.
#ifndef TIERMEM_ROUNDING_H
#define TIERMEM_ROUNDING_H

#include <stdint.h>

#include "loops.h"

enum tm_dithered { TM_DITHER_M = 0, TM_DITHER_V = 1, TM_DITHER_MASTER = 2, TM_DITHER_LARGEST = 3 };

// splitmix64's last part: every bit of x reaches every bit of the answer.
static inline uint64_t tm_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The words of elements that follow `element`, up to the next multiple of 2^32.
static inline tm_dither tm_dither_at(uint64_t key, uint64_t step, int part, uint64_t element) {
    static const uint32_t STRIDES[] = {0x9e3779b9u, 0x6a09e667u, 0xbb67ae85u, 0xa54ff53bu};
    const uint64_t pair = (uint64_t)part / 2 + 1;
    const uint64_t salt = tm_mix(tm_mix(key + pair * 0x9e3779b97f4a7c15ull) + (element >> 32));
    tm_dither dither;
    dither.start = (uint32_t)element * TM_HASH_STRIDE + (uint32_t)salt;
    dither.salt = (uint32_t)(salt >> 32);
    dither.shift = part % 2 ? 16 : 0;
    dither.offset = (uint32_t)step * STRIDES[part];
    return dither;
}

#endif
