// How near to the machine is floor 0? Prints, in one run: a bare io_uring loop and the queue on the same
// file, Adam beside a plain stream of the same bytes, and a tile's check, step and sum in one pass beside three.
// For a person to run; nothing is asserted.
//
//     bench_native [MiB of file, 2048] [block KiB, 1024] [depth, 32]

#include <algorithm>
#include <functional>
#include <memory>
#include <string.h>
#include <thread>
#include <time.h>

#include "cpu.h"
#include "dtype.h"
#include "fixture.h"
#include "pass.h"
#include "workers.h"

#ifdef TIERMEM_HAVE_URING
#include <liburing.h>
#endif

static const tm_step_numbers NUMBERS = {0, {1e-3, 0.9999, 1, 0.9, 0.999, 1e-8, 1, 0, 0, 0}};

static double now_s(clockid_t clock = CLOCK_MONOTONIC) {
    timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double time_s(const std::function<void()> &body) {
    const double begin = now_s();
    body();
    return now_s() - begin;
}

#ifdef TIERMEM_HAVE_URING
// The least that moves a file: keep `depth` blocks in flight, nothing else.
static void move_bare(io_uring *ring, int kind, int fd, char *buffer, uint64_t bytes, uint64_t block, unsigned depth) {
    uint64_t issued = 0, ended = 0;
    while (ended < bytes) {
        while (issued < bytes && issued - ended < depth * block) {
            io_uring_sqe *sqe = io_uring_get_sqe(ring);
            if (kind == TM_READ)
                io_uring_prep_read_fixed(sqe, fd, buffer + issued, (unsigned)block, issued, (int)(issued >> 30));
            else
                io_uring_prep_write_fixed(sqe, fd, buffer + issued, (unsigned)block, issued, (int)(issued >> 30));
            issued += block;
        }
        io_uring_submit_and_wait(ring, 1);
        io_uring_cqe *cqe;
        while (io_uring_peek_cqe(ring, &cqe) == 0) {
            CHECK_EQUAL(cqe->res, block);
            io_uring_cqe_seen(ring, cqe);
            ended += block;
        }
    }
}

static void open_bare(io_uring *ring, unsigned depth, const Memory &memory) {
    CHECK_EQUAL(io_uring_queue_init(depth, ring, 0), 0);
    std::vector<iovec> pieces;
    for (uint64_t done = 0; done < memory.bytes; done += 1ull << 30)
        pieces.push_back({memory.data + done, std::min<uint64_t>(1ull << 30, memory.bytes - done)});
    if (io_uring_register_buffers(ring, pieces.data(), (unsigned)pieces.size()) != 0)
        printf("bare loop: buffers not registered\n");
}
#endif

// Alternates the contestants, since the disk's rate drifts.
static void bench_queue(uint64_t bytes, uint64_t block, unsigned depth) {
    File file(true);
    Memory memory(bytes);
    CHECK_EQUAL(tm_map_commit(memory.data, bytes), 0);
    CHECK_EQUAL(posix_fallocate(file.fd, 0, (off_t)bytes), 0);
    std::vector<std::pair<std::string, std::function<void(int)>>> contestants;
#ifdef TIERMEM_HAVE_URING
    io_uring ring;
    open_bare(&ring, depth, memory);
    contestants.push_back(
        {"bare io_uring", [&](int kind) { move_bare(&ring, kind, file.fd, memory.data, bytes, block, depth); }});
#endif
    std::vector<std::unique_ptr<Queue>> queues;
    for (int engine = TM_ENGINE_AUTO + 1; engine < TM_NUM_ENGINES; ++engine) {
        queues.emplace_back(new Queue(engine, depth, block, {}, &memory));
        Queue *queue = queues.back().get();
        if (queue->is_open)
            contestants.push_back({queue->why, [&, queue](int kind) {
                                       const tm_op op = op_of(kind, file, memory.data, bytes, 0, 1);
                                       CHECK_EQUAL(queue->transfer(op).error, 0);
                                   }});
    }
    for (auto &contestant : contestants)
        contestant.second(TM_WRITE);
    const int num_rounds = 7;
    for (int kind : {TM_READ, TM_WRITE}) {
        std::vector<std::vector<double>> rates(contestants.size());
        for (int round = 0; round < num_rounds; ++round)
            for (size_t i = 0; i < contestants.size(); ++i)
                rates[i].push_back((double)bytes / time_s([&] { contestants[i].second(kind); }) / 1e9);
        for (size_t i = 0; i < contestants.size(); ++i) {
            std::sort(rates[i].begin(), rates[i].end());
            printf("%-5s median %5.2f best %5.2f GB/s  %s\n", kind == TM_READ ? "read" : "write",
                   rates[i][num_rounds / 2], rates[i].back(), contestants[i].first.c_str());
        }
    }
#ifdef TIERMEM_HAVE_URING
    io_uring_queue_exit(&ring);
#endif
}

struct Stream {
    float *p, *m, *v;
    const float *g;
};

// The memory traffic of fp32 Adam (16 bytes read, 12 written per element), next to no arithmetic.
static void stream_task(void *context, uint64_t index) {
    const Stream *s = (const Stream *)context;
    const uint64_t begin = index * TM_NORM_BLOCK;
#pragma GCC ivdep
    for (uint64_t i = begin; i < begin + TM_NORM_BLOCK; ++i) {
        s->p[i] += s->g[i];
        s->m[i] += s->g[i];
        s->v[i] += s->g[i];
    }
}

static double best_of(int rounds, const std::function<void()> &body) {
    double best = 1e9;
    for (int i = 0; i < rounds; ++i)
        best = std::min(best, time_s(body));
    return best;
}

static void bench_kernels() {
    // No power of two: streams a large power of two apart (seen from 32 MiB on, 8 M elements) evict each other from
    // AMD's first-level cache, whose guess of the way is a hash of address bits 12 to 27 (up to 14 times slower for
    // anybody).
    const uint64_t n = 1000ull << 16;
    Memory memory(n * 22);
    CHECK_EQUAL(tm_map_commit(memory.data, memory.bytes), 0);
    float *p = (float *)memory.data, *m = p + n, *v = m + n, *g = v + n;
    void *low = g + n, *half = (char *)low + 2 * n; // half: the gradient in 16 bits
    for (uint64_t i = 0; i < n; ++i)
        g[i] = (float)(i % 1000) * 1e-3f;
    tm_workers *workers;
    const unsigned num_threads = std::max(1u, std::thread::hardware_concurrency());
    CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0);
    Stream stream = {p, m, v, g};
    const double per_element = 1e9 / (double)n;
    printf("%u threads, ns per parameter, best of 9\n", num_threads);
    for (int isa = 0; isa < 3; ++isa) {
        if (tm_isa_choose(isa) < 0)
            continue;
        const double bare = best_of(9, [&] { tm_workers_run(workers, n / TM_NORM_BLOCK, stream_task, &stream); });
        tm_step step = {};
        step.n = n;
        step.rule = TM_ADAMW;
        step.master = {p, nullptr, TM_F32, 0};
        step.grad = {(void *)g, nullptr, TM_F32, 0};
        step.moments[0] = {m, nullptr, TM_F32, 0};
        step.moments[1] = {v, nullptr, TM_F32, 0};
        step.numbers = &NUMBERS;
        const double fp32 = best_of(9, [&] { tm_optimizer_step(workers, &step); });
        const auto step_half = [&](int dtype) {
            CHECK_EQUAL(tm_gradient_store(workers, n, half, dtype, g, TM_F32, 0, 0, nullptr), 0);
            step.grad = {half, nullptr, dtype, 0};
            step.weight = {low, nullptr, dtype, 0};
            return best_of(9, [&] { tm_optimizer_step(workers, &step); });
        };
        const double f16 = step_half(TM_F16);
        const double bf16 = step_half(TM_BF16);
        std::vector<double> sums(n / TM_NORM_BLOCK);
        const double stored =
            best_of(9, [&] { tm_gradient_store(workers, n, p, TM_F32, half, TM_BF16, 1, 0, sums.data()); });
        const double measured =
            best_of(9, [&] { tm_gradient_store(workers, n, nullptr, TM_NONE, half, TM_BF16, 0, 0, sums.data()); });
        printf("%-8s 28-byte stream %.3f | Adam fp32 %.3f, bf16 g and p %.3f, fp16 g and p %.3f | "
               "gradient += bf16 %.3f, measured bf16 %.3f\n",
               tm_isa_name(isa), bare * per_element, fp32 * per_element, bf16 * per_element, f16 * per_element,
               stored * per_element, measured * per_element);
    }
    tm_workers_close(workers);
}

// A tile of states and weights, and the pieces of up to a MiB that are checked before its step and summed after it.
struct Tile {
    static const uint64_t NUMEL = 1 << 21;
    Memory memory{NUMEL * 16};
    tm_step step = {};
    char *end = memory.data;
    std::vector<const void *> pieces;
    std::vector<uint64_t> bytes;
    std::vector<uint32_t> crcs;
    tm_sums before, after;

    Tile(int master, int moment, int rounding) {
        step.n = NUMEL;
        step.rule = TM_ADAMW;
        step.rounding = rounding;
        step.numbers = &NUMBERS;
        step.grad = part(TM_BF16);
        pieces.clear();
        step.master = part(master);
        step.moments[0] = part(moment);
        step.moments[1] = part(moment);
        const size_t num_exact = pieces.size();
        step.weight = part(TM_BF16);
        bytes.assign(pieces.size(), 1 << 20);
        crcs.resize(2 * pieces.size());
        before = {master == TM_SPLIT ? pieces.size() : num_exact, pieces.data(), bytes.data(), crcs.data()};
        after = {pieces.size(), pieces.data(), bytes.data(), crcs.data() + pieces.size()};
        for (uint64_t i = 0; i < NUMEL; ++i)
            ((uint16_t *)step.grad.data)[i] = (uint16_t)(0x3c00 + i % 256);
    }
    tm_part part(int dtype) {
        char *begin = end;
        end += NUMEL * tm_dtype_bytes(dtype);
        for (char *at = begin; at < end; at += 1 << 20)
            pieces.push_back(at);
        return {begin, nullptr, dtype, 0};
    }
    void three_passes(tm_workers *workers) {
        tm_crc32c(workers, before.n, before.pieces, before.bytes, before.crcs);
        tm_optimizer_step(workers, &step);
        tm_crc32c(workers, after.n, after.pieces, after.bytes, after.crcs);
    }
};

// In turn, over tiles that no cache keeps until their turn comes again.
static void bench_pass(const char *name, unsigned num_threads, int master, int moment, int rounding) {
    std::vector<std::unique_ptr<Tile>> tiles;
    for (int i = 0; i < 16; ++i)
        tiles.emplace_back(new Tile(master, moment, rounding));
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0);
    std::vector<double> seconds[2], ratios;
    for (int round = 0; round < 9; ++round) {
        for (int is_one = 0; is_one < 2; ++is_one) {
            const double begin = now_s(CLOCK_PROCESS_CPUTIME_ID);
            for (auto &tile : tiles)
                if (is_one)
                    CHECK_EQUAL(tm_pass_run(workers, 1, &tile->step, &tile->before, &tile->after), 0);
                else
                    tile->three_passes(workers);
            seconds[is_one].push_back(now_s(CLOCK_PROCESS_CPUTIME_ID) - begin);
        }
        ratios.push_back(seconds[1].back() / seconds[0].back());
    }
    for (std::vector<double> *numbers : {&seconds[0], &seconds[1], &ratios})
        std::sort(numbers->begin(), numbers->end());
    const double per_element = 1e9 / (double)(tiles.size() * Tile::NUMEL);
    printf("%-7s %u threads: check, step and sum %.3f ns of CPU a parameter in three passes, %.3f in one; ratio %.3f\n",
           name, num_threads, seconds[0][4] * per_element, seconds[1][4] * per_element, ratios[4]);
    tm_workers_close(workers);
}

int main(int argc, char **argv) {
    const uint64_t mib = argc > 1 ? strtoull(argv[1], nullptr, 10) : 2048;
    const uint64_t block_kib = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1024;
    const unsigned depth = argc > 3 ? (unsigned)strtoul(argv[3], nullptr, 10) : 32;
    for (unsigned num_threads : {1u, 2u}) {
        bench_pass("exact", num_threads, TM_F32, TM_F32, TM_NEAREST);
        bench_pass("compact", num_threads, TM_SPLIT, TM_BF16, TM_STOCHASTIC);
    }
    bench_kernels();
    bench_queue(mib << 20, block_kib << 10, depth);
}
