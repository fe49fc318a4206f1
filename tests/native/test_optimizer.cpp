// Is one optimizer step what the formula says, and the same bits from every instruction set, number of threads and cut,
// fused or not, for every combination of dtypes? And the bits that an x86-64 processor gave when they were recorded?

#include "reference.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

static const uint64_t N = 65536 + 1237; // two tasks, an odd end

// What a test steps, and how.
struct Case {
    int rule, weight, master, grad, moments[3], rounding;
    uint32_t flags;
};

static bool is_positive(int rule, int moment) { return rule == TM_ADAGRAD || moment > 0; }

// The memory of one part: its elements begin one element behind the start, aligned to themselves and no further.
struct Held {
    std::vector<char> data;
    std::vector<uint8_t> scales;
    int dtype = TM_NONE;

    tm_part part() {
        if (dtype == TM_NONE)
            return {nullptr, nullptr, TM_NONE, 0};
        return {data.data() + tm_dtype_bytes(dtype), scales.data(), dtype, 0};
    }
    void set(int wanted, const std::vector<float> &values, uint16_t *weight) {
        dtype = wanted;
        if (dtype == TM_NONE)
            return;
        data.assign((N + 1) * tm_dtype_bytes(dtype), 0);
        scales.assign(N / TM_Q8_BLOCK + 1, 0);
        const tm_part made = part();
        CHECK_EQUAL(tm_part_narrow(nullptr, N, values.data(), &made, weight), 0);
    }
    bool operator==(const Held &other) const { return data == other.data && scales == other.scales; }
};

struct State {
    Held weight, master, grad, moments[3];

    State(const Case &c, uint64_t seed) {
        Numbers numbers{seed};
        std::vector<float> p(N), g(N), m(N), v(N);
        for (uint64_t i = 0; i < N; ++i) {
            p[i] = numbers.uniform();
            m[i] = numbers.uniform() * 0.1f;
            v[i] = fabsf(numbers.uniform()) * 0.01f;
            g[i] = numbers.uniform() * (i % 7 == 0 ? 1e-6f : 1.0f);
        }
        v[5] = g[7] = m[8] = 0;
        v[6] = m[6] = g[6] = 1e-40f; // denormals count
        weight.set(c.weight, p, nullptr);
        master.set(c.master, p, (uint16_t *)weight.part().data);
        grad.set(c.grad, g, nullptr);
        for (int k = 0; k < 3; ++k)
            moments[k].set(c.moments[k], is_positive(c.rule, k) ? v : m, nullptr);
    }
    bool operator==(const State &other) const {
        return weight == other.weight && master == other.master && grad == other.grad &&
               moments[0] == other.moments[0] && moments[1] == other.moments[1] && moments[2] == other.moments[2];
    }
    // The checksum of every byte, behind those that `crc` is of.
    uint32_t checksum(uint32_t crc) const {
        for (const Held *held : {&weight, &master, &grad, &moments[0], &moments[1], &moments[2]}) {
            const void *pieces[] = {held->data.data(), held->scales.data()};
            const uint64_t bytes[] = {held->data.size(), held->scales.size()};
            uint32_t crcs[2];
            CHECK_EQUAL(tm_crc32c(nullptr, 2, pieces, bytes, crcs), 0);
            for (int k = 0; k < 2; ++k)
                crc = tm_crc32c_combine(crc, crcs[k], bytes[k]);
        }
        return crc;
    }
};

static tm_step_scalars scalars_of(int rule) {
    const bool is_decoupled = rule == TM_ADAMW || rule == TM_LION;
    tm_step_scalars s;
    s.step_size = 3e-3 / (1 - 0.9);
    s.decay = is_decoupled ? 1 - 3e-3 * 0.1 : 0.1;
    s.grad_scale = 0.37;
    s.beta1 = 0.9;
    s.beta2 = 0.95;
    s.eps = 1e-8;
    s.inv_sqrt_bias2 = 1 / sqrt(1 - 0.95);
    s.momentum = 0.8;
    s.dampening = 0.3;
    s.initial = 0.25;
    return s;
}

static const tm_step_numbers *numbers_of(int rule) {
    static tm_step_numbers of_rules[5];
    of_rules[rule] = {1234567, scalars_of(rule)};
    return &of_rules[rule];
}

static tm_step step_of(State *s, const Case &c) {
    tm_step step;
    memset(&step, 0, sizeof step);
    step.n = N;
    step.weight = s->weight.part();
    step.master = s->master.part();
    step.grad = s->grad.part();
    for (int k = 0; k < 3; ++k)
        step.moments[k] = s->moments[k].part();
    step.key = 77;
    step.first_element = 3 * 65536 + 11;
    step.rule = c.rule;
    step.rounding = c.rounding;
    step.flags = c.flags;
    step.numbers = numbers_of(c.rule);
    return step;
}

// ---- the formula ---------------------------------------------------------------------------------------------------

// The header's formulas, one element at a time, in the same fp32 operations.
static void step_element(const Case &c, float g, float *p, float *m, float *v, float *w) {
    const tm_step_scalars d = scalars_of(c.rule);
    const float lr = (float)d.step_size, decay = (float)d.decay, beta1 = (float)d.beta1, beta2 = (float)d.beta2;
    const float rest1 = (float)(1 - d.beta1), rest2 = (float)(1 - d.beta2), eps = (float)d.eps;
    g = g * (float)(c.flags & TM_STEP_MAXIMIZE ? -d.grad_scale : d.grad_scale);
    if (c.rule == TM_ADAMW || c.rule == TM_LION)
        *p = *p * decay;
    else
        g = g + decay * *p;
    if (c.rule == TM_ADAMW || c.rule == TM_ADAM) {
        *m = *m + (g - *m) * rest1;
        *v = *v * beta2 + (g * g) * rest2;
        *w = fmaxf(*w, *v);
        const float largest = c.moments[2] == TM_NONE ? *v : *w;
        *p = *p - lr * (*m / (sqrtf(largest) * (float)d.inv_sqrt_bias2 + eps));
    } else if (c.rule == TM_ADAGRAD) {
        *m = *m + g * g;
        *p = *p - lr * (g / (sqrtf(*m) + eps));
    } else if (c.rule == TM_LION) {
        const float update = *m * beta1 + g * rest1;
        *p = *p - lr * (update > 0 ? 1.0f : update < 0 ? -1.0f : update);
        *m = *m * beta2 + g * rest2;
    } else {
        const bool is_first = c.flags & TM_STEP_START_MOMENTS;
        *m = is_first ? g : *m * (float)d.momentum + g * (float)(1 - d.dampening);
        const float moved = c.flags & TM_STEP_NESTEROV ? g + (float)d.momentum * *m : *m;
        *p = *p - lr * (c.moments[0] == TM_NONE ? g : moved);
    }
}

static std::vector<float> widened(Held *held, const Held *weight) {
    std::vector<float> values(N);
    const tm_part part = held->part();
    if (held->dtype != TM_NONE)
        CHECK_EQUAL(tm_part_widen(nullptr, N, &part, weight->data.data() + 2, values.data()), 0);
    return values;
}

static void put(Held *held, const std::vector<float> &values, Held *weight) {
    const tm_part part = held->part();
    if (held->dtype != TM_NONE)
        CHECK_EQUAL(tm_part_narrow(nullptr, N, values.data(), &part, weight->data.data() + 2), 0);
}

static void step_reference(State *s, const Case &c) {
    Held *master = c.master == TM_NONE || (c.flags & TM_STEP_START_MASTER) ? &s->weight : &s->master;
    std::vector<float> p = widened(master, &s->weight), g = widened(&s->grad, &s->weight), moments[3];
    for (int k = 0; k < 3; ++k) {
        moments[k] = widened(&s->moments[k], &s->weight);
        if (c.flags & TM_STEP_START_MOMENTS)
            moments[k].assign(N, c.rule == TM_ADAGRAD ? 0.25f : 0.0f);
    }
    for (uint64_t i = 0; i < N; ++i)
        step_element(c, g[i], &p[i], &moments[0][i], &moments[1][i], &moments[2][i]);
    put(&s->weight, p, &s->weight);
    put(&s->master, p, &s->weight);
    for (int k = 0; k < 3; ++k)
        put(&s->moments[k], moments[k], &s->weight);
}

static void the_step_is_the_formula(const Case &c) {
    tm_isa_choose(0);
    State wanted(c, 11), seen = wanted;
    step_reference(&wanted, c);
    const tm_step step = step_of(&seen, c);
    CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    CHECK(seen == wanted);
}

// ---- the same bits -------------------------------------------------------------------------------------------------

static void step_in_tiles(State *s, const Case &c, uint64_t first_element) {
    for (uint64_t begin = 0, length = 64 * 7; begin < N; begin += length, length = length * 2 - 64) {
        tm_step step = step_of(s, c);
        step.n = N - begin < length ? N - begin : length;
        step.first_element = first_element + begin;
        tm_part *parts[] = {&step.weight,     &step.master,     &step.grad,
                            &step.moments[0], &step.moments[1], &step.moments[2]};
        for (tm_part *part : parts) {
            if (part->dtype == TM_NONE)
                continue;
            part->data = tm_dtype_at(part->data, part->dtype, begin);
            part->scales += begin / TM_Q8_BLOCK;
        }
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    }
}

// Returns the checksum of the bits, behind those that `crc` is of.
static uint32_t every_way_gives_the_same_bits(uint32_t crc, const std::vector<int> &isas, tm_workers *workers,
                                              const Case &c, uint64_t first_element) {
    Case slow = c;
    slow.flags |= TM_STEP_UNFUSED;
    tm_isa_choose(0);
    const State start(c, 12); // copied: making one takes longer than a step
    State wanted = start;
    tm_step step = step_of(&wanted, slow);
    step.first_element = first_element;
    CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    for (int isa : isas) {
        tm_isa_choose(isa);
        State shared = start, alone = start, tiled = start;
        step = step_of(&shared, c);
        step.first_element = first_element;
        CHECK_EQUAL(tm_optimizer_step(workers, &step), 0);
        CHECK(shared == wanted);
        step = step_of(&alone, slow);
        step.first_element = first_element;
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
        CHECK(alone == wanted);
        step_in_tiles(&tiled, c, first_element);
        CHECK(tiled == wanted);
    }
    tm_isa_choose(-1);
    return wanted.checksum(crc);
}

// ---- every combination ---------------------------------------------------------------------------------------------

static const int MASTERS[][2] = {{TM_NONE, TM_F32},   {TM_F32, TM_F32},   {TM_BF16, TM_F32}, {TM_F16, TM_F32},
                                 {TM_BF16, TM_SPLIT}, {TM_BF16, TM_NONE}, {TM_F16, TM_NONE}, {TM_F32, TM_NONE}};
static const int MOMENTS[][2] = {{TM_F32, TM_F32}, {TM_BF16, TM_BF16}, {TM_F16, TM_F16},
                                 {TM_Q8, TM_Q8},   {TM_BF16, TM_F32},  {TM_Q8, TM_BF16}};

static int moment_dtype(int rule, int moment, int dtype) {
    return dtype == TM_Q8 && is_positive(rule, moment) ? (int)TM_Q8_POSITIVE : dtype;
}

static std::vector<Case> cases_of_adam(int rule) {
    std::vector<Case> cases;
    for (auto &master : MASTERS)
        for (auto &moment : MOMENTS)
            for (int grad : {TM_F32, TM_BF16, TM_F16})
                cases.push_back({rule,
                                 master[0],
                                 master[1],
                                 grad,
                                 {moment[0], moment_dtype(rule, 1, moment[1]), TM_NONE},
                                 TM_NEAREST,
                                 0});
    return cases;
}

static std::vector<Case> cases_of_the_others() {
    std::vector<Case> cases;
    for (auto &master : MASTERS)
        for (int dtype : {TM_F32, TM_BF16, TM_F16, TM_Q8})
            for (int rule : {TM_ADAMW, TM_ADAM, TM_ADAGRAD, TM_LION, TM_SGD}) {
                Case c = {
                    rule,       master[0],       master[1], TM_BF16, {moment_dtype(rule, 0, dtype), TM_NONE, TM_NONE},
                    TM_NEAREST, TM_STEP_MAXIMIZE};
                if (rule == TM_ADAMW || rule == TM_ADAM) // amsgrad
                    c.moments[1] = c.moments[2] = moment_dtype(rule, 1, dtype);
                cases.push_back(c);
                c.flags = TM_STEP_START_MOMENTS;
                cases.push_back(c);
                if (rule == TM_SGD) {
                    c.flags = TM_STEP_NESTEROV;
                    cases.push_back(c);
                    c.flags = TM_STEP_NESTEROV | TM_STEP_START_MOMENTS;
                    cases.push_back(c);
                    c.moments[0] = TM_NONE;
                    c.flags = 0;
                    cases.push_back(c);
                }
                if (master[0] != TM_NONE) {
                    c.flags = TM_STEP_START;
                    cases.push_back(c);
                }
            }
    return cases;
}

static std::vector<Case> all_cases() {
    std::vector<Case> cases = cases_of_adam(TM_ADAMW);
    for (const auto &more : {cases_of_adam(TM_ADAM), cases_of_the_others()})
        cases.insert(cases.end(), more.begin(), more.end());
    return cases;
}

static void every_combination_is_the_formula() {
    for (const Case &c : all_cases())
        the_step_is_the_formula(c);
}

static void every_combination_has_the_recorded_answer(const std::vector<int> &isas, int rounding, uint32_t recorded) {
    tm_workers *workers;
    uint32_t crc = 0;
    CHECK_EQUAL(tm_workers_open(3, &workers), 0);
    for (Case c : all_cases()) {
        c.rounding = rounding;
        crc = every_way_gives_the_same_bits(crc, isas, workers, c, 12345);
    }
    CHECK_EQUAL(tm_workers_close(workers), 0);
    CHECK_EQUAL(crc, recorded);
}

static void elements_beyond_32_bits_have_the_recorded_answer(const std::vector<int> &isas, uint32_t recorded) {
    tm_workers *workers;
    uint32_t crc = 0;
    CHECK_EQUAL(tm_workers_open(3, &workers), 0);
    for (int dtype : {TM_BF16, TM_Q8}) {
        const Case c = {TM_ADAMW,      TM_BF16, TM_SPLIT, TM_BF16, {dtype, moment_dtype(TM_ADAMW, 1, dtype), TM_NONE},
                        TM_STOCHASTIC, 0};
        // passed inside a chunk and a block
        crc = every_way_gives_the_same_bits(crc, isas, workers, c, (1ull << 32) - 1003);
        crc = every_way_gives_the_same_bits(crc, isas, workers, c, (9ull << 32) + 64);
    }
    CHECK_EQUAL(tm_workers_close(workers), 0);
    CHECK_EQUAL(crc, recorded);
}

// Otherwise the comparisons above compare one way with itself.
static void what_people_train_with_is_fused(int isa) {
    const int parts[][3] = {{TM_NONE, TM_F32, TM_F32},    {TM_BF16, TM_F32, TM_F32},   {TM_BF16, TM_SPLIT, TM_F32},
                            {TM_BF16, TM_SPLIT, TM_BF16}, {TM_BF16, TM_NONE, TM_BF16}, {TM_BF16, TM_SPLIT, TM_Q8}};
    const tm_loops *loops = loops_of(isa);
    for (auto &wanted : parts) {
        unsigned num_found = 0; // two gradients, two decays, two roundings where something is rounded
        for (unsigned i = 0; i < loops->num_fused; ++i) {
            const tm_fused *one = &loops->fused[i];
            num_found += one->weight == wanted[0] && one->master == wanted[1] && one->moment == wanted[2];
        }
        CHECK_EQUAL(num_found, wanted[2] == TM_F32 ? 4 : 8);
    }
}

// ---- what is not finite, and what is not allowed -------------------------------------------------------------------

static void nan_and_infinity_stay_visible(const std::vector<int> &isas) {
    for (int isa : isas)
        for (Case c : cases_of_adam(TM_ADAMW)) {
            tm_isa_choose(isa);
            if (c.grad != TM_F32)
                continue;
            c.rounding = isa % 2;
            State s(c, 13);
            const float bad[] = {NAN, INFINITY, -INFINITY, float_of(0x7fffffffu), float_of(0xffffffffu)};
            memcpy((float *)s.grad.part().data + 70, bad, sizeof bad);
            const tm_step step = step_of(&s, c);
            CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
            Held *master = c.master == TM_NONE ? &s.weight : &s.master;
            const std::vector<float> p = widened(master, &s.weight), m = widened(&s.moments[0], &s.weight);
            const std::vector<float> shown = c.weight == TM_NONE ? p : widened(&s.weight, &s.weight);
            for (uint64_t i = 0; i < 192; ++i) {
                const bool is_bad = i >= 70 && i < 75;
                const bool is_beside = c.moments[0] == TM_Q8 && i / TM_Q8_BLOCK == 70 / TM_Q8_BLOCK;
                CHECK(isnan(p[i]) == is_bad && isnan(shown[i]) == is_bad);
                CHECK(!isfinite(m[i]) == (is_bad || is_beside));
            }
        }
    tm_isa_choose(-1);
}

#if defined(__x86_64__)
static const unsigned FLUSHING = 0x1F80 | 0x8040 | 0x2000; // denormals flushed, rounding down
static unsigned float_mode() { return _mm_getcsr(); }
static void set_float_mode(unsigned mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
static const unsigned FLUSHING = 1u << 24 | 2u << 22;
static unsigned float_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return (unsigned)mode;
}
static void set_float_mode(unsigned mode) { asm volatile("msr fpcr, %0" ::"r"((uint64_t)mode)); }
#else
static const unsigned FLUSHING = 0;
static unsigned float_mode() { return 0; }
static void set_float_mode(unsigned) {}
#endif

static void the_callers_float_mode_is_neither_used_nor_changed() {
    const Case c = {TM_ADAMW, TM_NONE, TM_F32, TM_F32, {TM_F32, TM_F32, TM_NONE}, TM_NEAREST, 0};
    State wanted(c, 14), seen = wanted, shared = wanted;
    tm_step step = step_of(&wanted, c);
    CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    const unsigned before = float_mode();
    step = step_of(&seen, c);
    set_float_mode(FLUSHING);
    CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    const unsigned after = float_mode();
    set_float_mode(before);
    CHECK_EQUAL(after, FLUSHING);
    CHECK(seen == wanted);
    tm_workers *workers; // threads born under a strange mode do not keep it
    step = step_of(&shared, c);
    set_float_mode(FLUSHING);
    CHECK_EQUAL(tm_workers_open(3, &workers), 0);
    CHECK_EQUAL(tm_optimizer_step(workers, &step), 0);
    CHECK_EQUAL(tm_workers_close(workers), 0);
    set_float_mode(before);
    CHECK(shared == wanted);
}

static int answer_to(const Case &c, void (*spoil)(tm_step *)) {
    State s(c, 15);
    tm_step step = step_of(&s, c);
    spoil(&step);
    return tm_optimizer_step(nullptr, &step);
}

// A large step writes the bf16 copy past the caches, where its address allows.
static void a_large_step_has_the_bits_of_a_small_one(int isa, tm_workers *workers, uint64_t shift) {
    tm_isa_choose(isa);
    const uint64_t n = (1 << 20) + 37;
    std::vector<float> master[2], m[2], v[2];
    std::vector<uint16_t> weight[2], grad(n);
    for (uint64_t i = 0; i < n; ++i)
        grad[i] = (uint16_t)(0x3c00 + i % 997);
    for (int is_unfused = 0; is_unfused < 2; ++is_unfused) {
        weight[is_unfused].assign(n + 2 * shift, 7);
        for (std::vector<float> *part : {&master[is_unfused], &m[is_unfused], &v[is_unfused]}) {
            part->resize(n);
            for (uint64_t i = 0; i < n; ++i)
                (*part)[i] = (float)(i % 1013) * 1e-3f;
        }
        tm_step step;
        memset(&step, 0, sizeof step);
        step.n = n;
        step.rule = TM_ADAMW;
        step.numbers = numbers_of(TM_ADAMW);
        step.flags = is_unfused ? TM_STEP_UNFUSED : 0;
        step.weight = {weight[is_unfused].data() + shift, nullptr, TM_BF16, 0};
        step.master = {master[is_unfused].data(), nullptr, TM_F32, 0};
        step.grad = {grad.data(), nullptr, TM_BF16, 0};
        step.moments[0] = {m[is_unfused].data(), nullptr, TM_F32, 0};
        step.moments[1] = {v[is_unfused].data(), nullptr, TM_F32, 0};
        CHECK_EQUAL(tm_optimizer_step(workers, &step), 0);
    }
    CHECK(weight[0] == weight[1]); // the elements before and after as well
    CHECK(master[0] == master[1] && m[0] == m[1] && v[0] == v[1]);
    tm_isa_choose(-1);
}

static void the_environment_holds_the_choice_down(const std::vector<int> &isas) {
    const char *words[] = {"default", "avx2", "avx512", "a word of no meaning"};
    for (int most = 0; most < 4; ++most) {
        setenv("ATEN_CPU_CAPABILITY", words[most], 1);
        const int chosen = tm_isa_choose(-1);
        CHECK_EQUAL(chosen, most < isas.back() ? most : isas.back());
        CHECK_EQUAL(tm_isa_choose(isas.back()), isas.back()); // a number is an order
    }
    unsetenv("ATEN_CPU_CAPABILITY");
    CHECK_EQUAL(tm_isa_choose(-1), isas.back());
}

static void bad_arguments_are_refused() {
    const Case c = {TM_ADAMW, TM_BF16, TM_SPLIT, TM_BF16, {TM_Q8, TM_Q8_POSITIVE, TM_NONE}, TM_NEAREST, 0};
    CHECK_EQUAL(answer_to(c, [](tm_step *) {}), 0);
    void (*const spoils[])(tm_step *) = {
        [](tm_step *s) { s->rule = 5; },
        [](tm_step *s) { s->rounding = 2; },
        [](tm_step *s) { s->numbers = nullptr; },
        [](tm_step *s) { s->flags = 1024; },
        [](tm_step *s) { s->first_element = ~0ull; },
        [](tm_step *s) { s->grad.dtype = TM_SPLIT; },
        [](tm_step *s) { s->grad.data = nullptr; },
        [](tm_step *s) { s->weight.data = nullptr; },
        [](tm_step *s) { s->weight.dtype = TM_F16; },
        [](tm_step *s) { s->weight.dtype = TM_NONE; },
        [](tm_step *s) { s->master.dtype = TM_BF16; },
        [](tm_step *s) { s->master.data = nullptr; },
        [](tm_step *s) { s->moments[0].dtype = TM_NONE; },
        [](tm_step *s) { s->moments[0].dtype = TM_Q8_POSITIVE; },
        [](tm_step *s) { s->moments[1].dtype = TM_Q8; },
        [](tm_step *s) { s->moments[1].scales = nullptr; },
        [](tm_step *s) { s->moments[2].dtype = TM_F32; },
        [](tm_step *s) { s->moments[0].dtype = TM_SPLIT; },
        [](tm_step *s) { s->rule = TM_LION; },
        [](tm_step *s) { s->rule = TM_SGD; },
        [](tm_step *s) { s->rule = TM_ADAGRAD; },
        [](tm_step *s) { s->master.dtype = TM_NONE, s->weight.dtype = TM_NONE; },
        [](tm_step *s) { s->master.dtype = TM_F32, s->weight.dtype = TM_NONE, s->flags = TM_STEP_START_MASTER; },
    };
    for (auto spoil : spoils)
        CHECK_EQUAL(answer_to(c, spoil), -EINVAL);
    CHECK_EQUAL(answer_to(c, [](tm_step *s) { memset(s, 0, sizeof *s); }), 0); // nothing to step
    CHECK_EQUAL(tm_optimizer_step(nullptr, nullptr), -EINVAL);
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(0, &workers), -EINVAL);
    CHECK_EQUAL(tm_workers_open(2, nullptr), -EINVAL);
}

// Without an argument all; with one a part, so that long parts run side by side: "formula", "nearest", "stochastic", or
// "short", which an emulator does in a few seconds.
int main(int argc, char **argv) {
    const std::vector<int> isas = find_isas();
    const auto is_asked = [&](const char *part) { return argc == 1 || strcmp(argv[1], part) == 0; };
    if (is_asked("formula"))
        RUN(every_combination_is_the_formula);
    if (is_asked("nearest"))
        RUN(every_combination_has_the_recorded_answer, isas, TM_NEAREST, 0x375ee3b4u);
    if (is_asked("stochastic"))
        RUN(every_combination_has_the_recorded_answer, isas, TM_STOCHASTIC, 0x0ccdc6bau);
    if (!is_asked("short"))
        return 0;
    RUN(elements_beyond_32_bits_have_the_recorded_answer, isas, 0xc80694c4u);
    for (int isa : isas)
        RUN(what_people_train_with_is_fused, isa);
    RUN(nan_and_infinity_stay_visible, isas);
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(2, &workers), 0);
    for (int isa : isas)
        for (uint64_t shift : {0, 1, 8})
            RUN(a_large_step_has_the_bits_of_a_small_one, isa, workers, shift);
    tm_workers_close(workers);
    RUN(the_callers_float_mode_is_neither_used_nor_changed);
    RUN(the_environment_holds_the_choice_down, isas);
    RUN(bad_arguments_are_refused);
}
