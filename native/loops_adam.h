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

// ---- what a part is, in one element --------------------------------------------------------------------------

struct GradF32 {
    static const int DTYPE = 1; // TM_F32
    static const uint64_t BYTES = 4;
    static float load_one(const void *grad, uint64_t i) { return ((const float *)grad)[i]; }
    static FloatPair load(const void *grad, uint64_t i) { return load_floats((const float *)grad + i); }
};

struct GradBf16 {
    static const int DTYPE = 2; // TM_BF16
    static const uint64_t BYTES = 2;
    static float load_one(const void *grad, uint64_t i) { return from_bf16(((const uint16_t *)grad)[i]); }
    static FloatPair load(const void *grad, uint64_t i) { return from_bf16(load_halves(grad, i)); }
};

struct MomentF32 {
    static const int DTYPE = 1;
    static const uint64_t BYTES = 4;
    static const bool IS_STOCHASTIC = false;
    static FloatPair load(const void *moment, uint64_t i) { return load_floats((const float *)moment + i); }
    static void store(void *moment, uint64_t i, FloatPair x, signed_halves) { store_floats((float *)moment + i, x); }
};

template <bool is_stochastic> struct MomentBf16 {
    static const int DTYPE = 2;
    static const uint64_t BYTES = 2;
    static const bool IS_STOCHASTIC = is_stochastic;
    static FloatPair load(const void *moment, uint64_t i) { return from_bf16(load_halves(moment, i)); }
    static void store(void *moment, uint64_t i, FloatPair x, signed_halves word) {
        store_halves(moment, i, is_stochastic ? to_bf16(x, word) : to_bf16(x));
    }
};

struct MasterSplit {
    static const int WEIGHT = 2, MASTER = 4; // TM_BF16, TM_SPLIT
    static const bool IS_STOCHASTIC = false;
    static FloatPair load(const tm_streams &s, uint64_t i) {
        return from_split(load_halves(s.weight, i), load_halves(s.master, i));
    }
    static void store(const tm_streams &s, uint64_t i, FloatPair p, signed_halves) {
        const UintPair bits = shown_nan(p);
        store_halves(s.weight, i, upper_of({bits.even + 0x8000u, bits.odd + 0x8000u}));
        store_halves(s.master, i, lower_of(bits));
    }
};

template <bool is_stochastic> struct MasterBf16 {
    static const int WEIGHT = 2, MASTER = 0;
    static const bool IS_STOCHASTIC = is_stochastic;
    static FloatPair load(const tm_streams &s, uint64_t i) { return from_bf16(load_halves(s.weight, i)); }
    static void store(const tm_streams &s, uint64_t i, FloatPair p, signed_halves word) {
        store_halves(s.weight, i, is_stochastic ? to_bf16(p, word) : to_bf16(p));
    }
};

// ---- the loops -----------------------------------------------------------------------------------------------

// Steps m and v, and returns where p moves. Members are assigned one by one: the compiler would copy a whole pair
// through memory in parts.
template <bool is_decoupled>
inline FloatPair adam_pair(FloatPair p, FloatPair &m, FloatPair &v, FloatPair g, const tm_constants &c) {
    const AdamElement<floats> even = adam_moments<is_decoupled>(p.even, m.even, v.even, g.even, c);
    const AdamElement<floats> odd = adam_moments<is_decoupled>(p.odd, m.odd, v.odd, g.odd, c);
    m.even = even.m;
    m.odd = odd.m;
    v.even = even.v;
    v.odd = odd.v;
    return {adam_moved(even.p, even.m, even.v, c), adam_moved(odd.p, odd.m, odd.v, c)};
}

// A step reads more arrays than a processor's own prefetcher follows, and too many instructions lie between two lines
// of one for it to be ahead by itself.
const uint64_t AHEAD = 1024; // bytes
const uint64_t LINE = 64;

// Fetches the lines that lie AHEAD of the elements [i, i + num), of `bytes` each, of an array.
template <unsigned bytes, unsigned num> inline void prefetch(const void *array, uint64_t i) {
    if (i * bytes % LINE == 0)
        for (unsigned k = 0; k < num * bytes; k += LINE)
            __builtin_prefetch((const char *)array + i * bytes + AHEAD + k);
}

template <class Master, class Moment, class Grad, bool is_decoupled>
void adam_fused(uint64_t n, const tm_streams *streams, const tm_constants *constants) {
    const tm_streams s = *streams;
    const tm_constants c = *constants;
    const tm_dither random = s.moment_dithers[0], random_v = s.moment_dithers[1], random_p = s.master_dither;
    for (uint64_t i = 0; i < n; i += PAIR) {
        prefetch<2, PAIR>(s.weight, i);
        if (Master::MASTER)
            prefetch<2, PAIR>(s.master, i);
        prefetch<Moment::BYTES, PAIR>(s.m, i);
        prefetch<Moment::BYTES, PAIR>(s.v, i);
        prefetch<Grad::BYTES, PAIR>(s.grad, i);
        FloatPair m = Moment::load(s.m, i), v = Moment::load(s.v, i);
        const FloatPair p = adam_pair<is_decoupled>(Master::load(s, i), m, v, Grad::load(s.grad, i), c);
        const uint32_t ahead = (uint32_t)i * TM_HASH_STRIDE;
        const UintPair x = Moment::IS_STOCHASTIC ? hashes_of(random.start + ahead, random.salt) : UintPair{};
        const UintPair y = Master::IS_STOCHASTIC ? hashes_of(random_p.start + ahead, random_p.salt) : UintPair{};
        Moment::store(s.m, i, m, upper_words(x, random.offset));
        Moment::store(s.v, i, v, lower_words(x, random_v.offset));
        Master::store(s, i, p, upper_words(y, random_p.offset));
    }
}

// A master and moments in fp32: elements keep their order, and the compiler vectorises one by one as well.
template <class Grad, bool has_copy, bool is_decoupled>
void adam_f32(uint64_t n, const tm_streams *streams, const tm_constants *constants) {
    const tm_constants c = *constants;
    float *p = (float *)streams->master, *m = (float *)streams->m, *v = (float *)streams->v;
    uint16_t *copy = (uint16_t *)streams->weight;
    const void *grad = streams->grad;
    for (uint64_t begin = 0; begin < n; begin += PAIR) {
        prefetch<4, PAIR>(p, begin);
        prefetch<4, PAIR>(m, begin);
        prefetch<4, PAIR>(v, begin);
        prefetch<Grad::BYTES, PAIR>(grad, begin);
        const int32_t end = (int32_t)(n - begin < PAIR ? n : begin + PAIR);
#pragma GCC ivdep
        for (int32_t i = (int32_t)begin; i < end; ++i) {
            const AdamElement<float> e = adam_moments<is_decoupled>(p[i], m[i], v[i], Grad::load_one(grad, i), c);
            const float moved = adam_moved(e.p, e.m, e.v, c);
            m[i] = e.m;
            v[i] = e.v;
            p[i] = moved;
            if (has_copy)
                copy[i] = to_bf16(moved);
        }
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
void adam_f32_copying(uint64_t n, const tm_streams *streams, const tm_constants *constants) {
    if (!streams->is_streamed)
        return adam_f32<Grad, true, is_decoupled>(n, streams, constants);
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
        adam_f32<Grad, true, is_decoupled>(num, &s, constants);
        write_past_caches(num, copy, weight + begin);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Of one of the two parts that one hash serves.
struct SharesOfHashes {
    const UintPair *hashes;
    uint32_t shift, offset;
    UintPair operator()(unsigned i) const {
        return {~offset - (hashes[i].even << shift), ~offset - (hashes[i].odd << shift)};
    }
};

template <class Master, bool is_stochastic, class Grad, bool is_decoupled>
inline void adam_q8_block(uint64_t begin, const tm_streams &s, const tm_constants &c) {
    FloatPair m[Q8_PAIRS], v[Q8_PAIRS];
    UintPair hashes[Q8_PAIRS];
    uint8_t *m_codes = (uint8_t *)s.m + begin, *v_codes = (uint8_t *)s.v + begin;
    uint8_t *m_scale = s.m_scales + begin / Q8_BLOCK, *v_scale = s.v_scales + begin / Q8_BLOCK;
    const tm_dither random = s.moment_dithers[0], random_v = s.moment_dithers[1];
    q8_decode_block<SignedQ8>(m_codes, *m_scale, m);
    q8_decode_block<PositiveQ8>(v_codes, *v_scale, v);
    for (unsigned k = 0; k < Q8_PAIRS; ++k) {
        const uint64_t i = begin + k * PAIR;
        const FloatPair p = adam_pair<is_decoupled>(Master::load(s, i), m[k], v[k], Grad::load(s.grad, i), c);
        if (is_stochastic) {
            const UintPair hash = hashes_of(random.start + (uint32_t)i * TM_HASH_STRIDE, random.salt);
            hashes[k].even = hash.even;
            hashes[k].odd = hash.odd;
        }
        Master::store(s, i, p, signed_halves{});
    }
    *m_scale = q8_encode_block<SignedQ8, is_stochastic>(m, SharesOfHashes{hashes, 0, random.offset}, m_codes);
    *v_scale = q8_encode_block<PositiveQ8, is_stochastic>(v, SharesOfHashes{hashes, 16, random_v.offset}, v_codes);
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

template <class Grad, bool is_decoupled> constexpr tm_fused fused_f32_entry() {
    return {0 /* TM_NONE */,
            1 /* TM_F32 */,
            Grad::DTYPE,
            MomentF32::DTYPE,
            is_decoupled,
            false,
            adam_f32<Grad, false, is_decoupled>};
}

template <class Grad, bool is_decoupled> constexpr tm_fused fused_copying_entry() {
    return {2 /* TM_BF16 */,
            1 /* TM_F32 */,
            Grad::DTYPE,
            MomentF32::DTYPE,
            is_decoupled,
            false,
            adam_f32_copying<Grad, is_decoupled>};
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

#define TM_EACH_DECAY(entry, ...) entry<__VA_ARGS__, true>(), entry<__VA_ARGS__, false>()
#define TM_EACH_GRAD(entry, ...) TM_EACH_DECAY(entry, __VA_ARGS__, GradF32), TM_EACH_DECAY(entry, __VA_ARGS__, GradBf16)

const tm_fused FUSED[] = {
    TM_EACH_DECAY(fused_f32_entry, GradF32),
    TM_EACH_DECAY(fused_f32_entry, GradBf16),
    TM_EACH_DECAY(fused_copying_entry, GradF32),
    TM_EACH_DECAY(fused_copying_entry, GradBf16),
    TM_EACH_GRAD(fused_entry, MasterSplit, MomentF32),
    TM_EACH_GRAD(fused_entry, MasterSplit, MomentBf16<false>),
    TM_EACH_GRAD(fused_entry, MasterSplit, MomentBf16<true>),
    TM_EACH_GRAD(fused_entry, MasterBf16<false>, MomentBf16<false>),
    TM_EACH_GRAD(fused_entry, MasterBf16<true>, MomentBf16<true>),
    TM_EACH_GRAD(fused_q8_entry, false),
    TM_EACH_GRAD(fused_q8_entry, true),
};

} // namespace
