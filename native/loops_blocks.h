// Blocks of 64 weights with one fp32 scale: codes of 8 or 4 bits. Part of loops_body.h.
//
//     8 bits    scale = largest |x| / 127     code = round(x / scale), -127 to 127     value = code * scale
//     4 bits    scale = largest |x|           code = number of the nearest level       value = level * scale
//
// The 16 levels of NF4 are quantiles of a normal distribution, scaled to -1 to 1 (Dettmers et al. 2023, QLoRA, appendix
// E). Element 2i has the upper half of byte i. A number in the middle of two levels gets the lower one. A block that
// holds NaN or infinity becomes NaN as a whole, because its scale is not finite and no code is larger than 0.

namespace {

const unsigned WEIGHT_BLOCK = 64; // TM_WEIGHT_BLOCK

const float LEVELS[16] = {-1.0f,
                          -0.6961928009986877f,
                          -0.5250730514526367f,
                          -0.39491748809814453f,
                          -0.28444138169288635f,
                          -0.18477343022823334f,
                          -0.09105003625154495f,
                          0.0f,
                          0.07958029955625534f,
                          0.16093020141124725f,
                          0.24611230194568634f,
                          0.33791524171829224f,
                          0.44070982933044434f,
                          0.5626170039176941f,
                          0.7229568362236023f,
                          1.0f};

// ---- codes to fp32 -------------------------------------------------------------------------------------------

void unpack_int8(uint64_t num_blocks, const uint8_t *__restrict codes, const float *__restrict scales,
                 float *__restrict dst) {
    for (uint64_t block = 0; block < num_blocks; ++block) {
        const float scale = scales[block];
        for (unsigned i = 0; i < WEIGHT_BLOCK; ++i)
            dst[i] = (float)(int8_t)codes[i] * scale;
        codes += WEIGHT_BLOCK;
        dst += WEIGHT_BLOCK;
    }
}

#if defined(__AVX2__)

// The codes of 16 bytes, in the order of their elements: 16 in each half.
struct CodePair {
    __m128i first, second;
};

inline CodePair halves_of(const uint8_t *codes) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)codes), low = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, 4), low), odd = _mm_and_si128(bytes, low);
    return {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
}

#if defined(__AVX512F__)
inline void store_levels(__m128i codes, float scale, float *dst) {
    // All lanes are asked for by a mask: without one, gcc 12 warns of its own undefined value.
    const __m512i wide = _mm512_maskz_cvtepu8_epi32(0xffff, codes);
    const __m512 levels = _mm512_maskz_permutexvar_ps(0xffff, wide, _mm512_loadu_ps(LEVELS));
    _mm512_storeu_ps(dst, _mm512_mul_ps(levels, _mm512_set1_ps(scale)));
}
#else
inline void store_eight(__m128i codes, float scale, float *dst) {
    const __m256i wide = _mm256_cvtepu8_epi32(codes);
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(LEVELS), wide); // by the lowest 3 bits
    const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(LEVELS + 8), wide);
    const __m256 levels = _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 28)));
    _mm256_storeu_ps(dst, _mm256_mul_ps(levels, _mm256_set1_ps(scale)));
}

inline void store_levels(__m128i codes, float scale, float *dst) {
    store_eight(codes, scale, dst);
    store_eight(_mm_srli_si128(codes, 8), scale, dst + 8);
}
#endif

inline void unpack_nf4_block(const uint8_t *codes, float scale, float *dst) {
    for (unsigned i = 0; i < WEIGHT_BLOCK; i += 32) {
        const CodePair pair = halves_of(codes + i / 2);
        store_levels(pair.first, scale, dst + i);
        store_levels(pair.second, scale, dst + i + 16);
    }
}

#else

inline void unpack_nf4_block(const uint8_t *codes, float scale, float *dst) {
    for (unsigned i = 0; i < WEIGHT_BLOCK / 2; ++i) {
        dst[2 * i] = LEVELS[codes[i] >> 4] * scale;
        dst[2 * i + 1] = LEVELS[codes[i] & 15] * scale;
    }
}

#endif

void unpack_nf4(uint64_t num_blocks, const uint8_t *codes, const float *scales, float *dst) {
    for (uint64_t block = 0; block < num_blocks; ++block)
        unpack_nf4_block(codes + block * (WEIGHT_BLOCK / 2), scales[block], dst + block * WEIGHT_BLOCK);
}

// ---- fp32 to codes -------------------------------------------------------------------------------------------

inline float largest_size(const float *x) {
    uint32_t largest = 0;
    for (unsigned i = 0; i < WEIGHT_BLOCK; ++i) {
        const uint32_t size = size_of(bits_of(x[i]));
        largest = size > largest ? size : largest;
    }
    return float_of(largest > INFINITE ? QUIET_NAN : largest);
}

// x[i] / scale; 0 where that is not finite: in a block of zeros, or of denormals that leave no scale, or with a scale
// that is not finite.
inline void divide(const float *__restrict x, float scale, float *__restrict quotients) {
    for (unsigned i = 0; i < WEIGHT_BLOCK; ++i) {
        const uint32_t bits = bits_of(x[i] / scale);
        quotients[i] = float_of(select(size_of(bits) < INFINITE, bits, 0u));
    }
}

void pack_int8(uint64_t num_blocks, const float *src, uint8_t *codes, float *scales) {
    const float to_whole = 12582912.0f; // 1.5 * 2^23: adding it rounds to nearest even
    float quotients[WEIGHT_BLOCK];
    for (uint64_t block = 0; block < num_blocks; ++block) {
        scales[block] = largest_size(src) / 127.0f;
        divide(src, scales[block], quotients);
        for (unsigned i = 0; i < WEIGHT_BLOCK; ++i) {
            const float whole = (quotients[i] + to_whole) - to_whole;
            codes[i] = (uint8_t)(int8_t)(int32_t)(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
        }
        src += WEIGHT_BLOCK;
        codes += WEIGHT_BLOCK;
    }
}

void pack_nf4(uint64_t num_blocks, const float *src, uint8_t *codes, float *scales) {
    float quotients[WEIGHT_BLOCK];
    for (uint64_t block = 0; block < num_blocks; ++block) {
        uint32_t numbers[WEIGHT_BLOCK] = {};
        scales[block] = largest_size(src);
        divide(src, scales[block], quotients);
        for (unsigned k = 0; k < 15; ++k) {
            const float middle = (LEVELS[k] + LEVELS[k + 1]) * 0.5f;
            for (unsigned i = 0; i < WEIGHT_BLOCK; ++i)
                numbers[i] += quotients[i] > middle;
        }
        for (unsigned i = 0; i < WEIGHT_BLOCK / 2; ++i)
            codes[i] = (uint8_t)(numbers[2 * i] << 4 | numbers[2 * i + 1]);
        src += WEIGHT_BLOCK;
        codes += WEIGHT_BLOCK / 2;
    }
}

} // namespace
