// One element in every stored form: how it becomes fp32 and how fp32 becomes it. Part of loops_body.h.
//
// Conversions are integer arithmetic without branches, which compilers vectorise for any width. Rounding works on
// the pattern of the size |x|. To nearest: add half a unit of the last kept place (to even: a little less) and cut.
// Stochastically: add a random share of a unit and cut; in bf16 add a unit if the part that is cut off is above a
// random word.

namespace {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// By masks: nested conditions would become jumps, and no vectors.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & -(uint32_t)condition); }

const uint32_t INFINITE = 0x7f800000u, QUIET_NAN = 0x7fc00000u;

inline uint32_t size_of(uint32_t bits) { return bits & 0x7fffffffu; }

// The pattern of x, of one quiet NaN for all: adding to it and cutting leaves a NaN.
inline uint32_t shown_nan(float x) { return x != x ? QUIET_NAN : bits_of(x); }

// ---- random words --------------------------------------------------------------------------------------------

// The hash of a number, given start + number * TM_HASH_STRIDE (a loop adds instead of multiplying): two multiplications
// by odd numbers, each followed by a shift, so that every bit of the number and of the salts reaches every bit of both
// halves. A bijection of the number.
inline uint32_t hash(uint32_t multiple, uint32_t salt) {
    uint32_t x = (multiple ^ (multiple >> 15)) + salt;
    x = x * 0x846ca68bu;
    return x ^ (x >> 16);
}

// ---- bf16 ----------------------------------------------------------------------------------------------------

inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

inline uint16_t to_bf16(float x) {
    const uint32_t bits = shown_nan(x);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// x is the result of arithmetic: no signalling NaN. Above the largest finite number halves decide, as when rounding to
// nearest: no infinity by chance. What is not finite is cut.
inline uint16_t to_bf16(float x, uint32_t word) {
    const uint16_t upper = (uint16_t)(bits_of(x) >> 16), cut = (uint16_t)bits_of(x), size = upper & 0x7fff;
    const uint16_t finite_limit = size >= 0x7f7f ? 0x7fff : (uint16_t)(word >> 16);
    const uint16_t limit = size >= 0x7f80 ? 0xffff : finite_limit;
    return (uint16_t)(upper + (cut > limit));
}

// ---- fp16 ----------------------------------------------------------------------------------------------------

// Rebases the exponent; a denormal becomes normal by letting one subtraction shift it (exact).
inline float from_f16(uint16_t stored) {
    const uint32_t half = stored;
    const uint32_t shifted = (half & 0x7fffu) << 13;
    const uint32_t exponent = shifted & 0x0f800000u;
    const uint32_t rebased = shifted + (112u << 23);
    const uint32_t denormal = bits_of(float_of(rebased + (1u << 23)) - float_of(113u << 23));
    uint32_t bits = select(exponent == 0, denormal, rebased);
    bits = select(exponent == 0x0f800000u, rebased + (112u << 23), bits);
    return float_of(bits | (half & 0x8000u) << 16);
}

// Denormal results are rounded by the adder: 0.5 has its last bit where theirs is.
inline uint16_t to_f16(float x) {
    const uint32_t bits = bits_of(x), size = size_of(bits);
    const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    const uint32_t denormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t half = select(size < (113u << 23), denormal, normal);
    half = select(size >= (143u << 23), 0x7c00u, half);
    half = select(size > INFINITE, 0x7e00u, half);
    return (uint16_t)(half | (bits >> 31) << 15);
}

// A denormal result is a whole number of units of 2^-24 and a share of one, which the random word (16 bits of it, at
// their middle, so that the error of the mean is below 2^-17 units) is compared with.
inline uint16_t to_f16(float x, uint32_t word) {
    const uint32_t bits = bits_of(x), size = size_of(bits);
    const uint32_t share = select(size >= 0x477fe000u, 0x1000u, ~word >> 19);
    const uint32_t normal = (size - (112u << 23) + share) >> 13;
    const float units = float_of(select(size < (113u << 23), size, 0u)) * 16777216.0f;
    const int32_t whole = (int32_t)units;
    const float threshold = ((float)(int32_t)(word >> 16) + 0.5f) * (1.0f / 65536.0f);
    const uint32_t denormal = (uint32_t)whole + (uint32_t)(threshold < units - (float)whole);
    uint32_t half = select(size < (113u << 23), denormal, normal);
    half = select(size >= (143u << 23), 0x7c00u, half);
    half = select(size > INFINITE, 0x7e00u, half);
    return (uint16_t)(half | (bits >> 31) << 15);
}

// ---- split ---------------------------------------------------------------------------------------------------

// The low half, read as a signed number, is what rounding took away. No number rounds up to zero: a negative low half
// beside zero is left from a weight that the user has overwritten, and counts as zero. (Their sum would be a NaN.)
inline float from_split(uint16_t weight, uint16_t low) {
    const bool is_left = (weight & 0x7fffu) == 0 && (int16_t)low < 0;
    return float_of(((uint32_t)weight << 16) + (is_left ? 0u : (uint32_t)(int32_t)(int16_t)low));
}

// Every pattern comes back from a split master, but for the NaNs whose weight would be zero: they lose a bit.
inline uint32_t splittable(uint32_t bits) { return size_of(bits) >= 0x7fff8000u ? bits & ~0x8000u : bits; }

inline uint16_t weight_of_split(uint32_t bits) { return (uint16_t)((bits + 0x8000u) >> 16); }

} // namespace
