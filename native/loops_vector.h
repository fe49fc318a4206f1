// Two registers of fp32 at a time, and one register of 16-bit elements as two of 32 bits. Part of loops_body.h.
//
//     16-bit elements in memory     | a b c d ... |
//     as upper halves of 32 bits    | a 0 | c 0 |...   even        | b 0 | d 0 | ...   odd
//
// Even elements are shifted into place and odd ones masked, so no element crosses the register: a permutation costs
// more than the arithmetic of an element. What is done to 16-bit halves is done to both registers at once.
//
// Registers are the compiler's vector types: one source for every width and every processor. A conversion gives the
// bits of the function of the same name in loops_element.h.

namespace {

const unsigned LANES = 2 * TM_DOUBLES; // of 32 bits in a register
const unsigned PAIR = 2 * LANES;       // elements in two registers

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(4 * LANES)));
typedef int16_t signed_halves __attribute__((vector_size(4 * LANES)));

struct FloatPair {
    floats even, odd;
};

struct UintPair {
    uints even, odd;
};

template <class Vector> inline Vector load_vector(const void *from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector> inline void store_vector(void *to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof vector);
}

inline halves load_halves(const void *from, uint64_t i) { return load_vector<halves>((const uint16_t *)from + i); }
inline void store_halves(void *to, uint64_t i, halves x) { store_vector((uint16_t *)to + i, x); }

inline float square_root(float x) { return __builtin_sqrtf(x); }

// The compiler makes one instruction of it.
inline floats square_root(floats x) {
    for (unsigned i = 0; i < LANES; ++i)
        x[i] = __builtin_sqrtf(x[i]);
    return x;
}

// ---- halves --------------------------------------------------------------------------------------------------

const uint32_t UPPER = 0xffff0000u;

inline UintPair as_upper(halves x) { return {(uints)x << 16, (uints)x & UPPER}; }

// Even elements from the lower halves of `even`, odd ones from the upper halves of `odd`.
inline halves blend(uints even, uints odd) {
#if defined(__SSE4_1__)
    halves choice; // one instruction there
    for (unsigned i = 0; i < PAIR; ++i)
        choice[i] = (uint16_t)(i % 2 ? PAIR + i : i);
    return __builtin_shuffle((halves)even, (halves)odd, choice);
#else
    return (halves)((even & ~UPPER) | (odd & UPPER));
#endif
}

inline halves upper_of(UintPair x) { return blend(x.even >> 16, x.odd); }
inline halves lower_of(UintPair x) { return blend(x.even, x.odd << 16); }

inline UintPair bits_of(FloatPair x) { return {(uints)x.even, (uints)x.odd}; }
inline FloatPair floats_of(UintPair x) { return {(floats)x.even, (floats)x.odd}; }

inline uints shown_nan(floats x) { return x != x ? uints{} + QUIET_NAN : (uints)x; }
inline UintPair shown_nan(FloatPair x) { return {shown_nan(x.even), shown_nan(x.odd)}; }

// ---- fp32 in memory ------------------------------------------------------------------------------------------

inline FloatPair load_floats(const float *from) {
    const floats a = load_vector<floats>(from), b = load_vector<floats>(from + LANES);
    ints even, odd;
    for (unsigned i = 0; i < LANES; ++i)
        even[i] = (int32_t)(2 * i), odd[i] = (int32_t)(2 * i + 1);
    return {__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd)};
}

inline void store_floats(float *to, FloatPair x) {
    ints first, second;
    for (unsigned i = 0; i < LANES; ++i) {
        first[i] = (int32_t)(i / 2 + i % 2 * LANES);
        second[i] = (int32_t)(LANES / 2 + i / 2 + i % 2 * LANES);
    }
    store_vector(to, __builtin_shuffle(x.even, x.odd, first));
    store_vector(to + LANES, __builtin_shuffle(x.even, x.odd, second));
}

// ---- random words --------------------------------------------------------------------------------------------

inline uints hash(uints multiple, uint32_t salt) {
    uints x = (multiple ^ (multiple >> 15)) + salt;
    x = x * 0x846ca68bu;
    return x ^ (x >> 16);
}

// The hashes of PAIR elements that follow one another; `start` as in tm_dither.
inline UintPair hashes_of(uint32_t start, uint32_t salt) {
    uints even;
    for (unsigned i = 0; i < LANES; ++i)
        even[i] = 2 * i * TM_HASH_STRIDE;
    even += start;
    return {hash(even, salt), hash(even + TM_HASH_STRIDE, salt)};
}

// Of the words of the two parts that one hash serves the upper 16 bits, which is all that bf16 cuts off, less 2^15: as
// signed numbers they keep the order of the words.
inline signed_halves upper_words(UintPair hashes, uint32_t offset) {
    offset += 0x80000000u;
    return (signed_halves)upper_of({hashes.even + offset, hashes.odd + offset});
}
inline signed_halves lower_words(UintPair hashes, uint32_t offset) {
    return (signed_halves)(lower_of(hashes) + (uint16_t)((offset + 0x80000000u) >> 16));
}

// ---- bf16 and split ------------------------------------------------------------------------------------------

inline FloatPair from_bf16(halves x) { return floats_of(as_upper(x)); }

inline uints rounded_to_bf16(floats x) {
    const uints bits = shown_nan(x);
    return bits + 0x7fffu + (bits >> 16 & 1u);
}

inline halves to_bf16(FloatPair x) { return upper_of({rounded_to_bf16(x.even), rounded_to_bf16(x.odd)}); }

// `word` from upper_words or lower_words; the limits are less 2^15, too.
inline halves to_bf16(FloatPair x, signed_halves word) {
    const signed_halves upper = (signed_halves)upper_of(bits_of(x)), size = upper & 0x7fff;
    const signed_halves cut = (signed_halves)(lower_of(bits_of(x)) ^ 0x8000);
    const signed_halves finite_limit = size > 0x7f7e ? signed_halves{} - 1 : word;
    const signed_halves limit = size > 0x7f7f ? signed_halves{} + 0x7fff : finite_limit;
    return (halves)(upper - (signed_halves)(cut > limit));
}

inline FloatPair from_split(halves weight, halves low) {
    low &= ~(halves)(((weight & 0x7fff) == 0) & ((signed_halves)low < 0));
    const UintPair upper = as_upper(weight);
    return floats_of({upper.even + (uints)((ints)((uints)low << 16) >> 16), upper.odd + (uints)((ints)low >> 16)});
}

} // namespace
