// cpu: asks the processor once, keeps the choice of the instruction set, sets the float mode.

#include "cpu.h"

#include <atomic>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tiermem.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#if defined(__aarch64__)
static const char *const NAMES[] = {"NEON", "AVX2", "AVX-512"}; // which every such processor has
#else
static const char *const NAMES[] = {"plain C", "AVX2", "AVX-512"};
#endif
static const int NUM_ISAS = 3;

static std::atomic<int> chosen{-1}; // -1: nobody asked yet, the first kernel takes the best

static bool is_supported(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa == 2)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512cd");
    if (isa == 1)
        return __builtin_cpu_supports("avx2");
#endif
    return isa == 0;
}

// The most that ATEN_CPU_CAPABILITY allows: torch's kernels and these are held down together. torch warns of other
// words.
static int most_allowed() {
    const char *word = getenv("ATEN_CPU_CAPABILITY");
    if (word != nullptr && strcmp(word, "avx2") == 0)
        return 1;
    return word != nullptr && strcmp(word, "default") == 0 ? 0 : NUM_ISAS - 1;
}

int tm_isa_choose(int32_t isa) {
    if (isa >= NUM_ISAS)
        return -ENOTSUP;
    if (isa < 0)
        for (isa = most_allowed(); !is_supported(isa);)
            --isa;
    if (!is_supported(isa))
        return -ENOTSUP;
    chosen.store(isa, std::memory_order_relaxed);
    return isa;
}

const char *tm_isa_name(int32_t isa) { return isa >= 0 && isa < NUM_ISAS ? NAMES[isa] : "unknown"; }

const tm_loops *tm_loops_chosen() {
    int isa = chosen.load(std::memory_order_relaxed);
    if (isa < 0)
        isa = tm_isa_choose(-1);
#if defined(__x86_64__)
    if (isa == 2)
        return &tm_loops_avx512;
    if (isa == 1)
        return &tm_loops_avx2;
#endif
    return &tm_loops_plain;
}

#if defined(__x86_64__)
static const unsigned MXCSR_DEFAULT = 0x1F80;

tm_float_mode::tm_float_mode() : saved_(_mm_getcsr()) { _mm_setcsr(MXCSR_DEFAULT); }
tm_float_mode::~tm_float_mode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
tm_float_mode::tm_float_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    saved_ = (unsigned)mode;
    asm volatile("msr fpcr, %0" ::"r"((uint64_t)0));
}
tm_float_mode::~tm_float_mode() { asm volatile("msr fpcr, %0" ::"r"((uint64_t)saved_)); }
#else
// Elsewhere the start-up mode is the wanted one and nothing here changes it.
tm_float_mode::tm_float_mode() : saved_(0) {}
tm_float_mode::~tm_float_mode() { (void)saved_; }
#endif
