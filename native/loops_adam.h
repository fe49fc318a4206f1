// Adam fused: one loop from stored parts to stored parts, for the combinations of dtypes that people train with.
// Part of loops_body.h.
//
//     weight  master  moments       grad
//     -       fp32    fp32          fp32, bf16
//     bf16    fp32    fp32          fp32, bf16
//     bf16    split   fp32, bf16    fp32, bf16
//     bf16    split   8-bit         fp32, bf16
//     bf16    -       bf16          fp32, bf16
//
// Everything else goes through arrays in the first-level cache (optimizer.cpp), to the same bits.

namespace {

void random_words(uint64_t n, const tm_dither *dither, uint32_t *__restrict words) {
    const tm_dither d = *dither;
    uint32_t multiple = d.start;
    for (uint64_t i = 0; i < n; ++i, multiple += TM_HASH_STRIDE)
        words[i] = (hash(multiple, d.salt) << d.shift) + d.offset;
}

// The words of the two parts that one hash serves.
inline uint32_t upper_word(uint32_t hash, uint32_t offset) { return hash + offset; }
inline uint32_t lower_word(uint32_t hash, uint32_t offset) { return (hash << 16) + offset; }

// The block's words of one of the two.
struct Words {
    const uint32_t *hashes;
    uint32_t shift, offset;
    uint32_t operator()(unsigned i) const { return (hashes[i] << shift) + offset; }
};

// ---- what a part is, in one element --------------------------------------------------------------------------

struct GradF32 {
    static const int DTYPE = 1; // TM_F32
    static const uint64_t BYTES = 4;
    static float load(const void *grad, uint64_t i) { return ((const float *)grad)[i]; }
};

struct GradBf16 {
    static const int DTYPE = 2; // TM_BF16
    static const uint64_t BYTES = 2;
    static float load(const void *grad, uint64_t i) { return from_bf16(((const uint16_t *)grad)[i]); }
};

struct MomentF32 {
    static const int DTYPE = 1;
    static const bool IS_STOCHASTIC = false;
    static float load(const void *moment, uint64_t i) { return ((const float *)moment)[i]; }
    static void store(void *moment, uint64_t i, float x, uint32_t) { ((float *)moment)[i] = x; }
};

template <bool is_stochastic> struct MomentBf16 {
    static const int DTYPE = 2;
    static const bool IS_STOCHASTIC = is_stochastic;
    static float load(const void *moment, uint64_t i) { return from_bf16(((const uint16_t *)moment)[i]); }
    static void store(void *moment, uint64_t i, float x, uint32_t word) {
        ((uint16_t *)moment)[i] = is_stochastic ? to_bf16(x, word) : to_bf16(x);
    }
};

struct MasterF32 {
    static const int WEIGHT = 0, MASTER = 1; // TM_NONE, TM_F32
    static const bool IS_STOCHASTIC = false;
    static float load(const tm_streams &s, uint64_t i) { return ((const float *)s.master)[i]; }
    static void store(const tm_streams &s, uint64_t i, float p, uint32_t) { ((float *)s.master)[i] = p; }
};

struct MasterF32AndCopy : MasterF32 {
    static const int WEIGHT = 2; // TM_BF16
    static void store(const tm_streams &s, uint64_t i, float p, uint32_t) {
        ((float *)s.master)[i] = p;
        ((uint16_t *)s.weight)[i] = to_bf16(p);
    }
};

struct MasterSplit {
    static const int WEIGHT = 2, MASTER = 4; // TM_BF16, TM_SPLIT
    static const bool IS_STOCHASTIC = false;
    static float load(const tm_streams &s, uint64_t i) {
        return from_split(((const uint16_t *)s.weight)[i], ((const uint16_t *)s.master)[i]);
    }
    static void store(const tm_streams &s, uint64_t i, float p, uint32_t) {
        const uint32_t bits = shown_nan(p);
        ((uint16_t *)s.weight)[i] = weight_of_split(bits);
        ((uint16_t *)s.master)[i] = (uint16_t)bits;
    }
};

template <bool is_stochastic> struct MasterBf16 {
    static const int WEIGHT = 2, MASTER = 0;
    static const bool IS_STOCHASTIC = is_stochastic;
    static float load(const tm_streams &s, uint64_t i) { return from_bf16(((const uint16_t *)s.weight)[i]); }
    static void store(const tm_streams &s, uint64_t i, float p, uint32_t word) {
        ((uint16_t *)s.weight)[i] = is_stochastic ? to_bf16(p, word) : to_bf16(p);
    }
};

// ---- the loops -----------------------------------------------------------------------------------------------

template <class Master, class Moment, class Grad, bool is_decoupled>
void adam_fused(uint64_t n, const tm_streams *streams, const tm_constants *constants) {
    const tm_streams s = *streams;
    const tm_constants c = *constants;
    const tm_dither random = s.moment_dithers[0], random_v = s.moment_dithers[1], random_p = s.master_dither;
    uint32_t multiple = random.start, multiple_p = random_p.start;
#pragma GCC ivdep
    for (int32_t i = 0; i < (int32_t)n; ++i, multiple += TM_HASH_STRIDE, multiple_p += TM_HASH_STRIDE) {
        const AdamElement e = adam_moments<is_decoupled>(Master::load(s, i), Moment::load(s.m, i), Moment::load(s.v, i),
                                                         Grad::load(s.grad, i), c);
        const uint32_t x = Moment::IS_STOCHASTIC ? hash(multiple, random.salt) : 0;
        const uint32_t y = Master::IS_STOCHASTIC ? hash(multiple_p, random_p.salt) : 0;
        Moment::store(s.m, i, e.m, upper_word(x, random.offset));
        Moment::store(s.v, i, e.v, lower_word(x, random_v.offset));
        Master::store(s, i, adam_moved(e.p, e.m, e.v, c), upper_word(y, random_p.offset));
    }
}

const uint64_t COPY = 512; // elements, in the first-level cache

// A plain store to memory that nobody reads makes the CPU read it first; one past the caches does not. The caller
// fences.
inline void write_past_caches(uint64_t n, const uint16_t *src, uint16_t *dst) {
    uint64_t i = 0;
#if defined(__SSE2__)
    if (((uintptr_t)dst & 15) == 0)
        for (; i + 8 <= n; i += 8)
            _mm_stream_si128((__m128i *)(dst + i), _mm_load_si128((const __m128i *)(src + i)));
#endif
    for (; i < n; ++i)
        dst[i] = src[i];
}

template <class Grad, bool is_decoupled>
void adam_fused_copying(uint64_t n, const tm_streams *streams, const tm_constants *constants) {
    typedef MomentF32 Moment;
    if (!streams->is_streamed)
        return adam_fused<MasterF32AndCopy, Moment, Grad, is_decoupled>(n, streams, constants);
    alignas(64) uint16_t copy[COPY];
    uint16_t *const weight = (uint16_t *)streams->weight;
    tm_streams s = *streams;
    s.weight = copy;
    for (uint64_t begin = 0; begin < n; begin += COPY) {
        const uint64_t num = n - begin < COPY ? n - begin : COPY;
        s.master = (float *)streams->master + begin;
        s.grad = (const char *)streams->grad + begin * Grad::BYTES;
        s.m = (float *)streams->m + begin;
        s.v = (float *)streams->v + begin;
        adam_fused<MasterF32AndCopy, Moment, Grad, is_decoupled>(num, &s, constants);
        write_past_caches(num, copy, weight + begin);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

template <class Master, bool is_stochastic, class Grad, bool is_decoupled>
inline void adam_q8_block(uint64_t begin, const tm_streams &s, const tm_constants &c) {
    float m[Q8_BLOCK], v[Q8_BLOCK];
    uint32_t hashes[Q8_BLOCK];
    uint8_t *m_codes = (uint8_t *)s.m + begin, *v_codes = (uint8_t *)s.v + begin;
    uint8_t *m_scale = s.m_scales + begin / Q8_BLOCK, *v_scale = s.v_scales + begin / Q8_BLOCK;
    const tm_dither random = s.moment_dithers[0], random_v = s.moment_dithers[1];
    uint32_t multiple = random.start + (uint32_t)begin * TM_HASH_STRIDE;
    q8_decode_block<SignedQ8>(Q8_BLOCK, m_codes, *m_scale, m);
    q8_decode_block<PositiveQ8>(Q8_BLOCK, v_codes, *v_scale, v);
#pragma GCC ivdep
    for (int32_t k = 0; k < (int32_t)Q8_BLOCK; ++k, multiple += TM_HASH_STRIDE) {
        const AdamElement e =
            adam_moments<is_decoupled>(Master::load(s, begin + k), m[k], v[k], Grad::load(s.grad, begin + k), c);
        m[k] = e.m;
        v[k] = e.v;
        hashes[k] = is_stochastic ? hash(multiple, random.salt) : 0;
        Master::store(s, begin + k, adam_moved(e.p, e.m, e.v, c), 0);
    }
    *m_scale = q8_encode_block<SignedQ8, is_stochastic>(Q8_BLOCK, m, Words{hashes, 0, random.offset}, m_codes);
    *v_scale = q8_encode_block<PositiveQ8, is_stochastic>(Q8_BLOCK, v, Words{hashes, 16, random_v.offset}, v_codes);
}

template <class Master, bool is_stochastic, class Grad, bool is_decoupled>
void adam_fused_q8(uint64_t n, const tm_streams *streams, const tm_constants *constants) {
    const tm_streams s = *streams;
    const tm_constants c = *constants;
    for (uint64_t begin = 0; begin < n; begin += Q8_BLOCK)
        adam_q8_block<Master, is_stochastic, Grad, is_decoupled>(begin, s, c);
}

// ---- the table -----------------------------------------------------------------------------------------------

template <class Master, class Moment, class Grad, bool is_decoupled> constexpr tm_fused fused_entry() {
    return {Master::WEIGHT,
            Master::MASTER,
            Grad::DTYPE,
            Moment::DTYPE,
            is_decoupled,
            Master::IS_STOCHASTIC || Moment::IS_STOCHASTIC,
            adam_fused<Master, Moment, Grad, is_decoupled>};
}

template <class Grad, bool is_decoupled> constexpr tm_fused fused_copying_entry() {
    return {MasterF32AndCopy::WEIGHT,
            MasterF32AndCopy::MASTER,
            Grad::DTYPE,
            MomentF32::DTYPE,
            is_decoupled,
            false,
            adam_fused_copying<Grad, is_decoupled>};
}

template <bool is_stochastic, class Grad, bool is_decoupled> constexpr tm_fused fused_q8_entry() {
    return {MasterSplit::WEIGHT,
            MasterSplit::MASTER,
            Grad::DTYPE,
            5 /* TM_Q8 */,
            is_decoupled,
            is_stochastic,
            adam_fused_q8<MasterSplit, is_stochastic, Grad, is_decoupled>};
}

#define TM_EACH_GRAD(entry, ...)                                                                                       \
    entry<__VA_ARGS__, GradF32, true>(), entry<__VA_ARGS__, GradF32, false>(), entry<__VA_ARGS__, GradBf16, true>(),   \
        entry<__VA_ARGS__, GradBf16, false>()

const tm_fused FUSED[] = {
    TM_EACH_GRAD(fused_entry, MasterF32, MomentF32),
    fused_copying_entry<GradF32, true>(),
    fused_copying_entry<GradF32, false>(),
    fused_copying_entry<GradBf16, true>(),
    fused_copying_entry<GradBf16, false>(),
    TM_EACH_GRAD(fused_entry, MasterSplit, MomentF32),
    TM_EACH_GRAD(fused_entry, MasterSplit, MomentBf16<false>),
    TM_EACH_GRAD(fused_entry, MasterSplit, MomentBf16<true>),
    TM_EACH_GRAD(fused_entry, MasterBf16<false>, MomentBf16<false>),
    TM_EACH_GRAD(fused_entry, MasterBf16<true>, MomentBf16<true>),
    TM_EACH_GRAD(fused_q8_entry, false),
    TM_EACH_GRAD(fused_q8_entry, true),
};

} // namespace
