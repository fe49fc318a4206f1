// 8-bit codes with a shared exponent: how 64 numbers become 65 bytes. Part of loops_body.h.
//
//     code     a small float relative to its block's scale S, 3 bits of mantissa:
//                  signed     1 + 4 + 3 bits, 2^-17 S to 1.875 S, exponent field 0 holds denormals
//                  positive   0 + 5 + 3 bits, 1.125 * 2^-31 S to 1.75 S (one step is kept free), no denormals
//              code 0 is 0
//     scale    one byte B, S = 2^(B - 127): the power of two under which the block's largest number fits;
//              0: nothing but zeros, 255: the block is NaN
//
// A second moment spans the square of what a first moment spans, hence its fifth bit of exponent; and one that is
// not 0 never becomes 0, or m / (sqrt(v) + eps) would explode: the smallest code stands in for it, which makes a
// step shorter, never longer. Codes are the upper bits of an fp32 pattern less a multiple of the exponent's last place,
// so scaling is one addition of integers, and rounding is the same addition as for bf16. B is 48 at least unless 0,
// so that no code stands for an fp32 denormal: 2^-111 and less may be rounded as if larger things lay beside them.
// A block that holds NaN, infinity, a number of 2^127 and more, or a negative one where none is allowed becomes
// NaN as a whole: nothing wrong is hidden, and sound blocks pay nothing for it.

namespace {

const unsigned Q8_BLOCK = 64; // TM_Q8_BLOCK

inline uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t smaller_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// What adds up to a code's fp32 pattern: the same for a whole block.
template <bool is_signed> inline uint32_t q8_base(uint8_t scale) {
    return ((uint32_t)scale - (is_signed ? 15u : 31u)) << 23;
}

struct SignedQ8 {
    static const bool IS_SIGNED = true;
    static const uint32_t CARRY = 0x0fffffu; // a mantissa beyond 1.875 takes the next scale
    static uint32_t size(float x) { return size_of(bits_of(x)); }

    // A denormal is shifted by the adder; of the two readings of a code the smaller is right.
    static float decode(int32_t code, uint32_t base) {
        const uint32_t normal = (((uint32_t)code & 0x7fu) << 20) + base, least = base + (1u << 23);
        const uint32_t denormal = bits_of(float_of(normal + (1u << 23)) - float_of(least));
        return float_of(smaller_of(normal, denormal) | ((uint32_t)code & 0x80000000u));
    }

    // The size as a normal number's pattern; as above, with the larger.
    static uint32_t pattern(float x, uint32_t base) {
        const uint32_t least = base + (1u << 23);
        return larger_of(bits_of(float_of(size(x)) + float_of(least)) - (1u << 23), size(x));
    }

    static uint8_t finish(float x, uint32_t rounded) {
        return (uint8_t)(((rounded & 0x7ffffffu) | (bits_of(x) >> 4 & 0x8000000u)) >> 20);
    }
};

struct PositiveQ8 {
    static const bool IS_SIGNED = false;
    static const uint32_t CARRY = 0x1fffffu;                    // beyond 1.75
    static uint32_t size(float x) { return bits_of(x + 0.0f); } // -0 counts as 0

    static float decode(int32_t code, uint32_t base) {
        return float_of(code == 0 ? 0u : ((uint32_t)code << 20) + base);
    }

    static uint32_t pattern(float x, uint32_t) { return bits_of(x); }

    // Below the smallest code the difference is negative.
    static uint8_t finish(float x, uint32_t rounded) {
        const int32_t code = (int32_t)rounded < 1 << 20 ? 1 << 20 : (int32_t)rounded;
        return (uint8_t)(x == 0.0f ? 0 : (uint32_t)code >> 20);
    }
};

template <class Q8> inline uint8_t q8_scale(unsigned n, const float *src) {
    uint32_t largest = 0;
    for (unsigned i = 0; i < n; ++i)
        largest = larger_of(largest, Q8::size(src[i]));
    if (largest >= INFINITE) // or negative
        return 255;
    const uint32_t scale = (largest + Q8::CARRY) >> 23;
    return (uint8_t)(largest == 0 ? 0 : scale < 48 ? 48 : scale < 254 ? scale : 255);
}

// NaN and nothing but zeros: where what the codes hold does not matter.
inline bool q8_is_special(uint8_t scale) { return scale == 0 || scale == 255; }

inline void q8_fill(unsigned n, float value, float *dst) {
    for (unsigned i = 0; i < n; ++i)
        dst[i] = value;
}

template <class Q8>
inline void q8_decode_block(unsigned n, const uint8_t *__restrict codes, uint8_t scale, float *__restrict dst) {
    if (q8_is_special(scale)) {
        q8_fill(n, scale == 0 ? 0.0f : float_of(QUIET_NAN), dst);
        return;
    }
    const uint32_t base = q8_base<Q8::IS_SIGNED>(scale);
    for (unsigned i = 0; i < n; ++i)
        dst[i] = Q8::decode(Q8::IS_SIGNED ? (int32_t)(int8_t)codes[i] : (int32_t)codes[i], base);
}

// Words answer words(i), the random word of the block's element i: up when the share beyond the code is above it.
template <class Q8, bool is_stochastic, class Words>
inline uint8_t q8_encode_block(unsigned n, const float *__restrict src, const Words words, uint8_t *__restrict codes) {
    const uint8_t scale = q8_scale<Q8>(n, src);
    if (q8_is_special(scale)) {
        for (unsigned i = 0; i < n; ++i)
            codes[i] = 0;
        return scale;
    }
    const uint32_t base = q8_base<Q8::IS_SIGNED>(scale);
    for (unsigned i = 0; i < n; ++i) {
        const uint32_t pattern = Q8::pattern(src[i], base);
        const uint32_t added =
            is_stochastic ? 0xfffffu - base - (words(i) >> 12) : 0x7ffffu - base + (pattern >> 20 & 1u);
        codes[i] = Q8::finish(src[i], pattern + added);
    }
    return scale;
}

struct WordArray {
    const uint32_t *words;
    uint32_t operator()(unsigned i) const { return words[i]; }
};

template <class Q8> void widen_q8(uint64_t n, const uint8_t *codes, const uint8_t *scales, float *dst) {
    uint64_t i = 0;
    for (; n - i >= Q8_BLOCK; i += Q8_BLOCK)
        q8_decode_block<Q8>(Q8_BLOCK, codes + i, scales[i / Q8_BLOCK], dst + i);
    if (i < n)
        q8_decode_block<Q8>((unsigned)(n - i), codes + i, scales[i / Q8_BLOCK], dst + i);
}

template <class Q8, bool is_stochastic>
void narrow_q8_all(uint64_t n, const float *src, const uint32_t *words, uint8_t *codes, uint8_t *scales) {
    uint64_t i = 0;
    for (; n - i >= Q8_BLOCK; i += Q8_BLOCK)
        scales[i / Q8_BLOCK] = q8_encode_block<Q8, is_stochastic>(Q8_BLOCK, src + i, WordArray{words + i}, codes + i);
    if (i < n)
        scales[i / Q8_BLOCK] =
            q8_encode_block<Q8, is_stochastic>((unsigned)(n - i), src + i, WordArray{words + i}, codes + i);
}

template <class Q8>
void narrow_q8(uint64_t n, const float *src, const uint32_t *words, uint8_t *codes, uint8_t *scales) {
    if (words)
        narrow_q8_all<Q8, true>(n, src, words, codes, scales);
    else
        narrow_q8_all<Q8, false>(n, src, words, codes, scales);
}

} // namespace
