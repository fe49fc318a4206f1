// bare_stream: the yardstick of an optimizer step in memory. The fastest loop that we can write over arrays of given
// sizes: vector loads of what is read, next to no arithmetic, vector stores of what is written, nothing else. Beside it
// the yardstick of a step's arithmetic: AdamW's kernel over arrays that stay in the first-level cache. Reads commands
// from stdin and answers each with one line, so that a benchmark can take turns with it:
//
//     isa NUMBER                  the most that the commands behind it may use, as tm_isa_choose -> the number
//     prepare N THREADS PART...   PART: bytes per element, then r, w or rw: `prepare 1024000 2 4rw 4rw 4rw 2r 2w`
//                                 tries every way to go over them and keeps the fastest
//                                 -> seconds of the best pass with plain stores, then with streaming stores
//     pass COUNT                  -> seconds of the best of COUNT passes in the way kept
//     arithmetic THREADS KIND WEIGHT MASTER MOMENTS GRADS ROUNDING
//                                 a row of `tiermem bench adam`: kernel or whole (with the sums for the norm),
//                                 precisions, nearest or stochastic -> seconds for a parameter, every thread with
//                                 arrays of its own
//     release                     -> 0, once the arrays are gone
//     quit
//
// A line that cannot be obeyed is answered with `error: ...`.
//
// Arrays lie in huge pages, an odd number of pages of 4 KiB apart: powers of two would make them evict each other from
// the first-level cache. Each thread is pinned to a core of its own where there are enough.

#include <algorithm>
#include <condition_variable>
#include <iostream>
#include <memory>
#include <mutex>
#include <sched.h>
#include <sstream>
#include <thread>
#include <time.h>

#include "fixture.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One array: `bytes` per element.
struct Part {
    uint64_t bytes;
    bool is_read, is_written;
    char *data;
};

static const uint64_t UNIT = 1024;                        // threads' shares are multiples of it
static const uint64_t BATCHES[] = {128, 256, 1024, 8192}; // elements of one array, then of the next: the best counts
static const int NUM_PASSES = 5;

static double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ---- the loops: bytes are a multiple of 64, addresses too ----------------------------------------------------------

typedef void pass_loop(char *data, uint64_t bytes);

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void read_512(char *data, uint64_t bytes) {
    __m512i a = _mm512_setzero_si512();
    for (uint64_t i = 0; i < bytes; i += 64)
        a = _mm512_xor_si512(a, _mm512_load_si512(data + i));
    asm volatile("" ::"v"(a));
}

template <bool is_read, bool is_streaming>
__attribute__((target("avx512f"))) static void write_512(char *data, uint64_t bytes) {
    const __m512i one = _mm512_set1_epi64(1);
    for (uint64_t i = 0; i < bytes; i += 64) {
        const __m512i x = is_read ? _mm512_xor_si512(one, _mm512_load_si512(data + i)) : one;
        if (is_streaming)
            _mm512_stream_si512((__m512i *)(data + i), x);
        else
            _mm512_store_si512(data + i, x);
    }
}

__attribute__((target("avx2"))) static void read_256(char *data, uint64_t bytes) {
    __m256i a = _mm256_setzero_si256();
    for (uint64_t i = 0; i < bytes; i += 32)
        a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i *)(data + i)));
    asm volatile("" ::"x"(a));
}

template <bool is_read, bool is_streaming>
__attribute__((target("avx2"))) static void write_256(char *data, uint64_t bytes) {
    const __m256i one = _mm256_set1_epi64x(1);
    for (uint64_t i = 0; i < bytes; i += 32) {
        const __m256i x = is_read ? _mm256_xor_si256(one, _mm256_load_si256((const __m256i *)(data + i))) : one;
        if (is_streaming)
            _mm256_stream_si256((__m256i *)(data + i), x);
        else
            _mm256_store_si256((__m256i *)(data + i), x);
    }
}
#endif

static void read_plain(char *data, uint64_t bytes) {
    uint64_t a = 0;
    for (uint64_t i = 0; i < bytes; i += 8)
        a ^= *(const uint64_t *)(data + i);
    asm volatile("" ::"r"(a));
}

template <bool is_read> static void write_plain(char *data, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += 8)
        *(uint64_t *)(data + i) = is_read ? *(const uint64_t *)(data + i) ^ 1 : 1;
}

static int most_isa = 2; // see tm_isa_choose

static pass_loop *choose_loop(const Part &part, bool is_streaming) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most_isa == 2 && __builtin_cpu_supports("avx512f")) {
        if (!part.is_written)
            return read_512;
        if (is_streaming)
            return part.is_read ? write_512<true, true> : write_512<false, true>;
        return part.is_read ? write_512<true, false> : write_512<false, false>;
    }
    if (most_isa >= 1 && __builtin_cpu_supports("avx2")) {
        if (!part.is_written)
            return read_256;
        if (is_streaming)
            return part.is_read ? write_256<true, true> : write_256<false, true>;
        return part.is_read ? write_256<true, false> : write_256<false, false>;
    }
#endif
    (void)is_streaming;
    return !part.is_written ? read_plain : part.is_read ? write_plain<true> : write_plain<false>;
}

// Batches of every array in turn, as an optimizer goes over its own.
static void pass(const std::vector<Part> &parts, uint64_t begin, uint64_t end, uint64_t batch, bool is_streaming) {
    std::vector<pass_loop *> loops;
    for (const Part &part : parts)
        loops.push_back(choose_loop(part, is_streaming));
    for (; begin < end; begin += batch)
        for (size_t i = 0; i < parts.size(); ++i)
            loops[i](parts[i].data + begin * parts[i].bytes, std::min(batch, end - begin) * parts[i].bytes);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// ---- threads -------------------------------------------------------------------------------------------------------

static void pin(unsigned index) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    index %= (unsigned)CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one);
            return;
        }
}

// Everybody waits until everybody is there.
struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    unsigned num_threads, num_waiting = 0;
    uint64_t round = 0;

    explicit Gate(unsigned num_threads) : num_threads(num_threads) {}
    void meet() {
        std::unique_lock<std::mutex> lock(mutex);
        const uint64_t mine = round;
        if (++num_waiting == num_threads) {
            num_waiting = 0;
            ++round;
            opened.notify_all();
        } else {
            opened.wait(lock, [&] { return round != mine; });
        }
    }
};

// One way to go over the arrays.
struct Way {
    uint64_t batch;
    bool is_streaming;
};

// What a `prepare` made, until the next.
struct Run {
    std::vector<Part> parts;
    uint64_t n;
    unsigned num_threads;
    Memory memory;
    Way kept = {BATCHES[0], false};

    Run(const std::vector<Part> &asked, uint64_t n, unsigned num_threads)
        : parts(asked), n(n), num_threads(num_threads), memory(place(parts, n)) {
        CHECK_EQUAL(tm_map_commit(memory.data, memory.bytes), 0);
        for (Part &part : parts)
            part.data = memory.data + (uintptr_t)part.data;
    }

    // Gives every array its offset, and returns the bytes of all.
    static uint64_t place(std::vector<Part> &parts, uint64_t n) {
        const uint64_t page = 4096;
        uint64_t bytes = 0;
        for (Part &part : parts) {
            part.data = (char *)(uintptr_t)bytes;
            bytes += (((n * part.bytes + page - 1) / page + 3) | 1) * page;
        }
        return bytes;
    }

    // Seconds of the best of `count` passes in each of the ways, which take turns.
    std::vector<double> best(const std::vector<Way> &ways, int count) {
        std::vector<double> seconds(ways.size(), 1e30);
        Gate gate(num_threads);
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < num_threads; ++i)
            threads.emplace_back([&, i] { work(i, ways, count, gate, seconds); });
        for (std::thread &thread : threads)
            thread.join();
        return seconds;
    }

    void work(unsigned index, const std::vector<Way> &ways, int count, Gate &gate, std::vector<double> &seconds) {
        pin(index);
        const uint64_t units = n / UNIT;
        const uint64_t begin = units * index / num_threads * UNIT, end = units * (index + 1) / num_threads * UNIT;
        for (int round = 0; round < count; ++round)
            for (size_t i = 0; i < ways.size(); ++i) {
                gate.meet();
                const double start = now_s();
                pass(parts, begin, end, ways[i].batch, ways[i].is_streaming);
                gate.meet();
                if (index == 0)
                    seconds[i] = std::min(seconds[i], now_s() - start);
            }
    }

    // Keeps the fastest way; seconds of the best with plain and with streaming stores.
    std::pair<double, double> choose() {
        std::vector<Way> ways;
        for (uint64_t batch : BATCHES)
            for (bool is_streaming : {false, true})
                ways.push_back({batch, is_streaming});
        const std::vector<double> seconds = best(ways, NUM_PASSES);
        double fastest[2] = {1e30, 1e30};
        for (size_t i = 0; i < ways.size(); ++i) {
            if (seconds[i] < std::min(fastest[0], fastest[1]))
                kept = ways[i];
            fastest[ways[i].is_streaming] = std::min(fastest[ways[i].is_streaming], seconds[i]);
        }
        return {fastest[0], fastest[1]};
    }
};

// ---- arithmetic ----------------------------------------------------------------------------------------------------

static const uint64_t CACHED = 1024; // parameters: with their gradients and states 28 KiB at most
static const int CACHED_STEPS = 1000, CACHED_ROUNDS = 9;

static int dtype_of(const std::string &precision) {
    return precision == "fp32"    ? TM_F32
           : precision == "bf16"  ? TM_BF16
           : precision == "split" ? TM_SPLIT
           : precision == "8bit"  ? TM_Q8
                                  : -1;
}

// The arrays of one thread, and the step over them.
struct CachedStep {
    std::vector<std::vector<char>> arrays; // a little apart: not at the same offset in their pages
    tm_step_numbers numbers = {};
    tm_step step = {};
    bool is_whole;

    tm_part make(int dtype, char value) {
        const bool is_q8 = dtype == TM_Q8 || dtype == TM_Q8_POSITIVE;
        const uint64_t bytes = CACHED * (dtype == TM_F32 ? 4 : is_q8 ? 1 : 2), apart = 256 * arrays.size();
        arrays.emplace_back(bytes + CACHED / TM_Q8_BLOCK + apart + 256, value);
        char *data = arrays.back().data() + apart;
        data += (64 - (uintptr_t)data % 64) % 64;
        return {data, (uint8_t *)data + bytes, dtype, 0};
    }

    CachedStep(const std::vector<std::string> &row) : is_whole(row[0] == "whole") {
        const int weight = dtype_of(row[1]), master = dtype_of(row[2]), moment = dtype_of(row[3]);
        const tm_part none = {nullptr, nullptr, TM_NONE, 0};
        step.weight = weight == master && weight == TM_F32 ? none : make(weight, 0x3d);
        step.master = weight == master && weight != TM_F32 ? none : make(master, 0x3d);
        step.moments[0] = make(moment, 0x3b);
        step.moments[1] = make(moment == TM_Q8 ? (int)TM_Q8_POSITIVE : moment, 0x3b);
        step.moments[2] = none;
        step.grad = make(dtype_of(row[4]), 0x3b);
        step.rounding = row[5] == "stochastic" ? TM_STOCHASTIC : TM_NEAREST;
        step.n = CACHED;
        step.rule = TM_ADAMW;
        step.numbers = &numbers;
        numbers.scalars.grad_scale = numbers.scalars.inv_sqrt_bias2 = 1;
        numbers.scalars.decay = 1 - 1e-6, numbers.scalars.step_size = 1e-4, numbers.scalars.eps = 1e-8;
        numbers.scalars.beta1 = 0.9, numbers.scalars.beta2 = 0.999;
    }

    void run() {
        double sum = 0;
        if (is_whole)
            CHECK_EQUAL(
                tm_gradient_store(nullptr, CACHED, nullptr, TM_NONE, step.grad.data, step.grad.dtype, 0, 0, &sum), 0);
        numbers.scalars.grad_scale = sum < 0 ? 0 : 1;
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    }
};

static double seconds_a_parameter(const std::vector<std::string> &row, unsigned num_threads) {
    double best = 1e30;
    Gate gate(num_threads);
    std::vector<std::thread> threads;
    for (unsigned index = 0; index < num_threads; ++index)
        threads.emplace_back([&, index] {
            pin(index);
            CachedStep cached(row);
            for (int round = 0; round < CACHED_ROUNDS; ++round) {
                gate.meet();
                const double start = now_s();
                for (int i = 0; i < CACHED_STEPS; ++i)
                    cached.run();
                gate.meet();
                if (index == 0)
                    best = std::min(best, now_s() - start);
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    return best / CACHED_STEPS / (double)(CACHED * num_threads);
}

// ---- commands ------------------------------------------------------------------------------------------------------

static bool parse_part(const std::string &word, Part *part) {
    char *end = nullptr;
    part->bytes = strtoull(word.c_str(), &end, 10);
    const std::string how = end;
    part->is_read = how == "r" || how == "rw";
    part->is_written = how == "w" || how == "rw";
    part->data = nullptr;
    return part->bytes > 0 && part->bytes <= 64 && (part->is_read || part->is_written);
}

static const char *prepare(std::istringstream &words, std::unique_ptr<Run> &run) {
    uint64_t n = 0;
    unsigned num_threads = 0;
    if (!(words >> n >> num_threads) || n < UNIT || n % UNIT != 0 || num_threads < 1 || num_threads > 1024)
        return "N is a multiple of 1024 and THREADS 1 to 1024";
    std::vector<Part> parts;
    for (std::string word; words >> word;) {
        parts.emplace_back();
        if (!parse_part(word, &parts.back()))
            return "a PART is 1 to 64 and r, w or rw, as in 4rw";
    }
    if (parts.empty())
        return "no PART";
    run.reset(); // its memory before that of the next
    run.reset(new Run(parts, n, num_threads));
    const std::pair<double, double> seconds = run->choose();
    printf("%.9f %.9f\n", seconds.first, seconds.second);
    return nullptr;
}

static const char *make_passes(std::istringstream &words, Run *run) {
    int count = 0;
    if (!(words >> count) || count < 1)
        return "COUNT is 1 or more";
    if (!run)
        return "nothing is prepared";
    printf("%.9f\n", run->best({run->kept}, count)[0]);
    return nullptr;
}

static const char *choose_isa(std::istringstream &words) {
    int isa = -1;
    if (!(words >> isa) || (isa = tm_isa_choose(isa)) < 0)
        return "NUMBER is -1 or an instruction set of this processor";
    most_isa = isa;
    printf("%d\n", isa);
    return nullptr;
}

static const char *measure_arithmetic(std::istringstream &words) {
    unsigned num_threads = 0;
    words >> num_threads;
    std::vector<std::string> row;
    for (std::string word; words >> word;)
        row.push_back(word);
    if (num_threads < 1 || num_threads > 1024 || row.size() != 6)
        return "THREADS is 1 to 1024, and six words say the row";
    for (int i = 1; i < 5; ++i)
        if (dtype_of(row[i]) < 0)
            return "a precision is fp32, bf16, split or 8bit";
    printf("%.15f\n", seconds_a_parameter(row, num_threads));
    return nullptr;
}

static const char *obey(const std::string &command, std::istringstream &words, std::unique_ptr<Run> &run) {
    if (command == "prepare")
        return prepare(words, run);
    if (command == "pass")
        return make_passes(words, run.get());
    if (command == "isa")
        return choose_isa(words);
    if (command == "arithmetic")
        return measure_arithmetic(words);
    if (command != "release")
        return "commands are isa, prepare, pass, arithmetic, release and quit";
    run.reset();
    puts("0");
    return nullptr;
}

int main() {
    std::unique_ptr<Run> run;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string command;
        words >> command;
        if (command == "quit")
            return 0;
        const char *error = obey(command, words, run);
        if (error)
            printf("error: %s\n", error);
        fflush(stdout);
    }
}
