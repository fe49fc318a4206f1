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

const unsigned Q8_PAIRS = Q8_BLOCK / PAIR;

typedef uint8_t codes_of_pair __attribute__((vector_size(PAIR)));

// The codes of a pair, with zeros above each.
inline halves load_codes(const uint8_t *codes) {
#if defined(__AVX512BW__)
    return (halves)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
#elif defined(__AVX2__)
    return (halves)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
#else
    halves wide; // the compiler makes two instructions of it
    for (unsigned i = 0; i < PAIR; ++i)
        wide[i] = codes[i];
    return wide;
#endif
}

inline uints larger_of(uints a, uints b) { return a > b ? a : b; }
inline uints smaller_of(uints a, uints b) { return a < b ? a : b; }

// What adds up to a code's fp32 pattern: the same for a whole block.
template <bool is_signed> inline uint32_t q8_base(uint8_t scale) {
    return ((uint32_t)scale - (is_signed ? 15u : 31u)) << 23;
}

struct SignedQ8 {
    static const bool IS_SIGNED = true;
    static const uint32_t CARRY = 0x0fffffu; // a mantissa beyond 1.875 takes the next scale
    static uints size(floats x) { return (uints)x & 0x7fffffffu; }

    // A denormal is shifted by the adder; of the two readings of a code the smaller is right.
    static floats decode_one(uints normal, uints sign, uint32_t base) {
        const uints denormal = (uints)((floats)(normal + (1u << 23)) - float_of(base + (1u << 23)));
        return (floats)(smaller_of(normal, denormal) | sign);
    }

    static FloatPair decode(halves codes, uint32_t base) {
        const UintPair normal = as_upper(((codes & 0x7f) << 4) + (uint16_t)(base >> 16));
        const UintPair sign = as_upper(codes << 8 & 0x8000);
        return {decode_one(normal.even, sign.even, base), decode_one(normal.odd, sign.odd, base)};
    }

    // The size as a normal number's pattern; as above, with the larger.
    static uints pattern(floats x, uint32_t base) {
        return larger_of((uints)((floats)size(x) + float_of(base + (1u << 23))) - (1u << 23), size(x));
    }

    static halves finish(FloatPair x, halves rounded) {
        return (rounded >> 4 & 0x7f) | (upper_of(bits_of(x)) >> 8 & 0x80);
    }
};

struct PositiveQ8 {
    static const bool IS_SIGNED = false;
    static const uint32_t CARRY = 0x1fffffu;                  // beyond 1.75
    static uints size(floats x) { return (uints)(x + 0.0f); } // -0 counts as 0

    static FloatPair decode(halves codes, uint32_t base) {
        return from_bf16(codes == 0 ? halves{} : (codes << 4) + (uint16_t)(base >> 16));
    }

    static uints pattern(floats x, uint32_t) { return (uints)x; }

    // Below the smallest code the difference is negative.
    static halves finish(FloatPair x, halves rounded) {
        const signed_halves code = (signed_halves)rounded, least = signed_halves{} + 16;
        const halves is_zero = blend((uints)(x.even == 0.0f), (uints)(x.odd == 0.0f));
        return ((halves)(code > least ? code : least) >> 4) & ~is_zero;
    }
};

// Of the first `num` lanes, by halves.
template <unsigned num> inline uint32_t largest_lane(uints x) {
    if constexpr (num == 1)
        return x[0];
    ints upper;
    for (unsigned i = 0; i < LANES; ++i)
        upper[i] = (int32_t)((i + num / 2) % LANES);
    return largest_lane<(num > 1 ? num / 2 : 1)>(larger_of(x, __builtin_shuffle(x, upper)));
}

template <class Q8> inline uint8_t q8_scale(const FloatPair *src) {
    uints sizes = {};
    for (unsigned i = 0; i < Q8_PAIRS; ++i)
        sizes = larger_of(sizes, larger_of(Q8::size(src[i].even), Q8::size(src[i].odd)));
    const uint32_t largest = largest_lane<LANES>(sizes);
    if (largest >= INFINITE) // or negative
        return 255;
    const uint32_t scale = (largest + Q8::CARRY) >> 23;
    return (uint8_t)(largest == 0 ? 0 : scale < 48 ? 48 : scale < 254 ? scale : 255);
}

// NaN and nothing but zeros: where what the codes hold does not matter.
inline bool q8_is_special(uint8_t scale) { return scale == 0 || scale == 255; }

template <class Q8> inline void q8_decode_block(const uint8_t *codes, uint8_t scale, FloatPair *dst) {
    if (q8_is_special(scale)) {
        const floats value = floats{} + (scale == 0 ? 0.0f : float_of(QUIET_NAN));
        for (unsigned i = 0; i < Q8_PAIRS; ++i)
            dst[i].even = dst[i].odd = value;
        return;
    }
    const uint32_t base = q8_base<Q8::IS_SIGNED>(scale);
    for (unsigned i = 0; i < Q8_PAIRS; ++i) {
        const FloatPair values = Q8::decode(load_codes(codes + i * PAIR), base);
        dst[i].even = values.even;
        dst[i].odd = values.odd;
    }
}

// `share` is what random words leave of 2^32.
template <bool is_stochastic> inline uints q8_rounded(uints pattern, uints share) {
    return pattern + (is_stochastic ? share >> 12 : 0x7ffffu + (pattern >> 20 & 1u));
}

// Shares answer shares(i), 2^32 - 1 less the random words of the block's pair i: up when what is beyond the code is
// above the words.
template <class Q8, bool is_stochastic, class Shares>
inline uint8_t q8_encode_block(const FloatPair *src, const Shares &shares, uint8_t *codes) {
    const uint8_t scale = q8_scale<Q8>(src);
    if (q8_is_special(scale)) {
        __builtin_memset(codes, 0, Q8_BLOCK);
        return scale;
    }
    const uint32_t base = q8_base<Q8::IS_SIGNED>(scale); // nothing in its lower half
    for (unsigned i = 0; i < Q8_PAIRS; ++i) {
        const UintPair share = is_stochastic ? shares(i) : UintPair{};
        const uints even = q8_rounded<is_stochastic>(Q8::pattern(src[i].even, base), share.even);
        const uints odd = q8_rounded<is_stochastic>(Q8::pattern(src[i].odd, base), share.odd);
        const halves finished = Q8::finish(src[i], upper_of({even, odd}) - (uint16_t)(base >> 16));
        store_vector(codes + i * PAIR, __builtin_convertvector(finished, codes_of_pair));
    }
    return scale;
}

// ---- over arrays; the last block may be a part of one ----------------------------------------------------------

struct SharesOfArray {
    const uint32_t *words;
    UintPair operator()(unsigned i) const {
        const UintPair word = bits_of(load_floats((const float *)words + i * PAIR));
        return {~word.even, ~word.odd};
    }
};

template <class Q8> inline void widen_q8_block(const uint8_t *codes, uint8_t scale, float *dst) {
    FloatPair values[Q8_PAIRS];
    q8_decode_block<Q8>(codes, scale, values);
    for (unsigned i = 0; i < Q8_PAIRS; ++i)
        store_floats(dst + i * PAIR, values[i]);
}

template <class Q8> void widen_q8(uint64_t n, const uint8_t *codes, const uint8_t *scales, float *dst) {
    uint64_t i = 0;
    for (; n - i >= Q8_BLOCK; i += Q8_BLOCK)
        widen_q8_block<Q8>(codes + i, scales[i / Q8_BLOCK], dst + i);
    if (i == n)
        return;
    uint8_t last_codes[Q8_BLOCK] = {};
    float last[Q8_BLOCK];
    __builtin_memcpy(last_codes, codes + i, n - i);
    widen_q8_block<Q8>(last_codes, scales[i / Q8_BLOCK], last);
    __builtin_memcpy(dst + i, last, (n - i) * sizeof(float));
}

template <class Q8, bool is_stochastic>
inline uint8_t narrow_q8_block(const float *src, const uint32_t *words, uint8_t *codes) {
    FloatPair values[Q8_PAIRS];
    for (unsigned i = 0; i < Q8_PAIRS; ++i)
        values[i] = load_floats(src + i * PAIR);
    return q8_encode_block<Q8, is_stochastic>(values, SharesOfArray{words}, codes);
}

template <class Q8, bool is_stochastic>
void narrow_q8_all(uint64_t n, const float *src, const uint32_t *words, uint8_t *codes, uint8_t *scales) {
    uint64_t i = 0;
    for (; n - i >= Q8_BLOCK; i += Q8_BLOCK)
        scales[i / Q8_BLOCK] = narrow_q8_block<Q8, is_stochastic>(src + i, words + i, codes + i);
    if (i == n)
        return;
    uint8_t last_codes[Q8_BLOCK];
    float last[Q8_BLOCK] = {}; // zeros set no scale
    uint32_t last_words[Q8_BLOCK] = {};
    __builtin_memcpy(last, src + i, (n - i) * sizeof(float));
    if (is_stochastic)
        __builtin_memcpy(last_words, words + i, (n - i) * sizeof(uint32_t));
    scales[i / Q8_BLOCK] = narrow_q8_block<Q8, is_stochastic>(last, last_words, last_codes);
    __builtin_memcpy(codes + i, last_codes, n - i);
}

template <class Q8>
void narrow_q8(uint64_t n, const float *src, const uint32_t *words, uint8_t *codes, uint8_t *scales) {
    if (words)
        narrow_q8_all<Q8, true>(n, src, words, codes, scales);
    else
        narrow_q8_all<Q8, false>(n, src, words, codes, scales);
}

} // namespace
