// Does a program step every tile once, to the bit of the kernel alone, whatever its buffers; and what is left after a
// failure?

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "fixture.h"
#include "program.h"

static const tm_step_numbers NUMBERS = {0, {1e-2, 0.99, 1.0, 0.9, 0.99, 1e-8, 1.5, 0, 0, 0}};
static const uint64_t NUMEL = 4096, STATES = 3 * 4 * NUMEL, WEIGHTS = 2 * NUMEL, TILE = STATES + WEIGHTS;

// Tiles of states (master, m, v in fp32) and bf16 weights in a file, gradients in memory.
struct World {
    uint32_t num_tiles;
    File file{true};
    Queue queue;
    tm_workers *workers = nullptr;
    tm_program *program = nullptr;
    std::vector<float> grads;
    std::vector<uint32_t> crcs;
    std::vector<uint8_t> is_known; // 0: no, 1: summed by a run, 2: put

    World(uint32_t num, std::vector<tm_fault> faults = {}, int engine = TM_ENGINE_AUTO)
        : num_tiles(num), queue(engine, 8, 16384, faults), grads(num * NUMEL), crcs(num), is_known(num, 2) {
        CHECK(queue.is_open);
        CHECK_EQUAL(tm_workers_open(2, &workers), 0);
        CHECK_EQUAL(tm_program_open(workers, 16 << 20, &program), 0);
        Numbers numbers{7};
        for (float &grad : grads)
            grad = numbers.uniform();
        for (uint32_t i = 0; i < num; ++i)
            put(i, first(i));
    }
    ~World() {
        CHECK_EQUAL(tm_program_close(program), 0);
        CHECK_EQUAL(tm_workers_close(workers), 0);
    }

    // The file is read and written round the queue, whose blocks are counted by the faults.
    void put(uint32_t tile, const std::vector<char> &bytes) {
        Memory memory(TILE);
        memcpy(memory.data, bytes.data(), TILE);
        CHECK_EQUAL(pwrite(file.fd, memory.data, TILE, (off_t)(tile * TILE)), TILE);
        const void *piece = memory.data;
        const uint64_t length = TILE;
        CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, &length, &crcs[tile]), 0);
    }
    std::vector<char> get(uint32_t tile) {
        Memory memory(TILE);
        CHECK_EQUAL(pread(file.fd, memory.data, TILE, (off_t)(tile * TILE)), TILE);
        return std::vector<char>(memory.data, memory.data + TILE);
    }
    std::vector<char> first(uint32_t tile) {
        std::vector<char> bytes(TILE);
        Numbers numbers{100 + tile};
        float *values = (float *)bytes.data();
        for (uint64_t i = 0; i < 3 * NUMEL; ++i)
            values[i] = i < 2 * NUMEL ? numbers.uniform() : 0.5f + 0.25f * numbers.uniform();
        return bytes;
    }
    tm_step step_of(uint32_t tile, char *buffer) {
        tm_step step = {};
        step.n = NUMEL;
        step.weight = {buffer + STATES, nullptr, TM_BF16, 0};
        step.master = {buffer, nullptr, TM_F32, 0};
        step.grad = {&grads[tile * NUMEL], nullptr, TM_F32, 0};
        step.moments[0] = {buffer + 4 * NUMEL, nullptr, TM_F32, 0};
        step.moments[1] = {buffer + 8 * NUMEL, nullptr, TM_F32, 0};
        step.rule = TM_ADAMW;
        step.numbers = &NUMBERS;
        return step;
    }
    std::vector<char> stepped(uint32_t tile) {
        std::vector<char> bytes = first(tile);
        const tm_step step = step_of(tile, bytes.data());
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
        return bytes;
    }
    void check_tile(uint32_t tile, bool is_stepped) { CHECK(get(tile) == (is_stepped ? stepped(tile) : first(tile))); }
};

// The tiles of a world, as a program gets them, and the memory of their buffers.
struct Run {
    World *world;
    Memory memory;
    std::vector<void *> buffers;
    std::vector<tm_transfer> transfers;
    std::vector<tm_piece> pieces;
    std::vector<tm_step> steps;
    std::vector<const tm_step *> pointers;
    std::vector<tm_tile> tiles;

    Run(World *w, uint32_t num_buffers) : world(w), memory(num_buffers * TILE) {
        const uint32_t n = w->num_tiles;
        for (uint32_t i = 0; i < num_buffers; ++i)
            buffers.push_back(memory.data + i * TILE);
        for (uint32_t i = 0; i < n; ++i) {
            transfers.push_back({w->queue.q, memory.data, TILE, i * TILE, nullptr, w->file.fd, 0});
            pieces.push_back({memory.data, TILE, &w->crcs[i], &w->is_known[i]});
            steps.push_back(w->step_of(i, memory.data));
        }
        for (uint32_t i = 0; i < n; ++i)
            pointers.push_back(&steps[i]);
        for (uint32_t i = 0; i < n; ++i)
            tiles.push_back({1000 + i, i / 2, 0, 1, 1, 1, 1, 1, 0, &transfers[i], &pieces[i], &pointers[i], &pieces[i],
                             &transfers[i], memory.data + STATES, WEIGHTS, nullptr, 0});
    }
    int begin(uint32_t num) {
        return tm_program_begin(world->program, buffers.data(), (uint32_t)buffers.size(), TILE, tiles.data(), num);
    }
    int start(uint32_t flags = 0, int32_t priority = TM_NORMAL) {
        return tm_program_run(world->program, buffers.data(), (uint32_t)buffers.size(), TILE, tiles.data(),
                              (uint32_t)tiles.size(), (uint32_t)tiles.size(), priority, flags);
    }
    int wait() { return tm_program_wait(world->program, -1, 1, -1); }
    tm_failure report(std::vector<tm_tile_times> *times = nullptr) {
        std::vector<tm_tile_times> own(tiles.size());
        tm_failure failure;
        CHECK_EQUAL(tm_program_report(world->program, own.data(), own.size(), &failure), (int)own.size());
        if (times)
            *times = own;
        return failure;
    }
    // The tiles that were begun go on with nothing more to read.
    void go_on(uint32_t num) {
        for (uint32_t i = 0; i < num; ++i) {
            tiles[i].flags |= TM_TILE_BEGUN;
            tiles[i].num_reads = tiles[i].num_checks = 0;
        }
    }
};

static uint32_t crc_of(const std::vector<char> &bytes) {
    const void *piece = bytes.data();
    const uint64_t length = bytes.size();
    uint32_t crc;
    CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, &length, &crc), 0);
    return crc;
}

// ---- every tile once ------------------------------------------------------------------------------------------------

static void test_every_tile_is_stepped_once(int engine, uint32_t num_buffers, uint32_t flags) {
    World world(7, {}, engine);
    Run run(&world, num_buffers);
    CHECK_EQUAL(run.start(flags), 0);
    CHECK_EQUAL(run.start(flags), -EBUSY);
    CHECK_EQUAL(run.wait(), 0);
    std::vector<tm_tile_times> times;
    CHECK_EQUAL(run.report(&times).error, 0);
    for (uint32_t i = 0; i < 7; ++i) {
        world.check_tile(i, true);
        CHECK_EQUAL(world.crcs[i], crc_of(world.stepped(i)));
        CHECK_EQUAL(world.is_known[i], 1);
        CHECK_EQUAL(times[i].is_ended, 1);
        CHECK_EQUAL(times[i].read_bytes, TILE);
        CHECK_EQUAL(times[i].written_bytes, TILE);
        CHECK(times[i].read_ns[1] <= times[i].step_ns[0] && times[i].step_ns[1] <= times[i].write_ns[0]);
        CHECK(times[i].check_ns[0] == 0 && times[i].sum_ns[0] == 0); // in one pass with the step
        if (i > 0 && (flags & TM_RUN_ONE_READ))
            CHECK(times[i - 1].step_ns[1] <= times[i].read_ns[0]);
        for (uint32_t j = 0; (flags & TM_RUN_ONE_WRITE) && j < i; ++j) // whichever was read first
            CHECK(times[j].write_ns[1] <= times[i].step_ns[0] || times[i].write_ns[1] <= times[j].step_ns[0]);
    }
    CHECK_EQUAL(world.queue.counters().read_bytes, 7 * TILE);
    CHECK_EQUAL(world.queue.counters().written_bytes, 7 * TILE);
}

static void test_tiles_in_memory_need_no_buffer() {
    World world(5);
    Run run(&world, 1);
    std::vector<std::vector<char>> states;
    for (uint32_t i = 0; i < 5; ++i)
        states.push_back(world.first(i));
    for (uint32_t i = 0; i < 5; ++i) {
        run.steps[i] = world.step_of(i, states[i].data());
        run.tiles[i].num_reads = run.tiles[i].num_checks = run.tiles[i].num_sums = run.tiles[i].num_writes = 0;
    }
    CHECK_EQUAL(tm_program_run(world.program, nullptr, 0, 0, run.tiles.data(), 5, 5, TM_NORMAL, 0), 0);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 5; ++i)
        CHECK(states[i] == world.stepped(i));
    run.tiles[0].num_reads = 1;
    CHECK_EQUAL(tm_program_run(world.program, nullptr, 0, 0, run.tiles.data(), 5, 5, TM_NORMAL, 0), -ENOBUFS);
}

static void test_a_run_of_nothing_ends() {
    World world(1);
    Run run(&world, 1);
    run.tiles.clear();
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 0);
    CHECK_EQUAL(tm_program_quiet(world.program), 0);
    CHECK_EQUAL(tm_program_stop(world.program), 0);
}

static void test_runs_follow_each_other() {
    World world(3);
    Run run(&world, 2);
    for (int i = 0; i < 3; ++i) {
        CHECK_EQUAL(run.start(), 0);
        CHECK_EQUAL(run.wait(), 0);
    }
    std::vector<char> expected = world.stepped(2);
    for (int i = 0; i < 2; ++i) {
        const tm_step step = world.step_of(2, expected.data());
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    }
    CHECK(world.get(2) == expected);
}

// The run begins with a part of its tiles and gets the others one by one.
static void test_tiles_are_added_while_the_run_goes_on(uint32_t num_at_first, uint32_t num_begun) {
    World world(12);
    Run run(&world, 2);
    if (num_begun > 0) {
        CHECK_EQUAL(run.begin(num_begun), 0);
        run.go_on(num_begun);
    }
    CHECK_EQUAL(
        tm_program_run(world.program, run.buffers.data(), 2, TILE, run.tiles.data(), num_at_first, 12, TM_NORMAL, 0),
        0);
    for (uint32_t i = num_at_first; i < 12; ++i) {
        CHECK_EQUAL(tm_program_wait(world.program, -1, 1, 100000), -ETIMEDOUT); // it waits for the rest
        CHECK_EQUAL(tm_program_add(world.program, &run.tiles[i], 1), 0);
    }
    CHECK(tm_program_add(world.program, &run.tiles[0], 1) != 0); // more than was said
    CHECK_EQUAL(run.wait(), 0);
    CHECK_EQUAL(run.report().error, 0);
    for (uint32_t i = 0; i < 12; ++i)
        world.check_tile(i, true);
    CHECK_EQUAL(tm_program_add(world.program, &run.tiles[0], 1), 1); // it has ended
}

// One buffer, so that each tile is read when the one before it has ended.
static void test_tiles_are_read_by_their_turns() {
    World world(7);
    Run run(&world, 1);
    const uint32_t turns[] = {3, 5, 2, 5, 2, 4, 0};
    for (uint32_t i = 0; i < 7; ++i)
        run.tiles[i].turn = turns[i];
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 0);
    std::vector<tm_tile_times> times;
    CHECK_EQUAL(run.report(&times).error, 0);
    const uint32_t expected[] = {6, 2, 4, 0, 5, 1, 3}; // as given within a turn
    for (uint32_t i = 0; i < 7; ++i) {
        world.check_tile(i, true);
        CHECK(i == 0 || times[expected[i - 1]].write_ns[1] <= times[expected[i]].read_ns[0]);
    }
}

static void test_a_run_that_never_gets_its_rest_is_stopped() {
    World world(6);
    Run run(&world, 2);
    CHECK_EQUAL(tm_program_run(world.program, run.buffers.data(), 2, TILE, run.tiles.data(), 3, 6, TM_NORMAL, 0), 0);
    CHECK_EQUAL(tm_program_wait(world.program, 0, 1, -1), 0);
    CHECK_EQUAL(tm_program_stop(world.program), 0);
    for (uint32_t i = 0; i < 6; ++i)
        if (i < 2 || i > 2)
            world.check_tile(i, i < 2);
}

// ---- reads before the run -------------------------------------------------------------------------------------------

static void test_begun_tiles_go_on_in_the_run(uint32_t num_begun, bool is_quiet) {
    World world(6);
    Run run(&world, 3);
    CHECK_EQUAL(run.begin(num_begun), 0);
    CHECK_EQUAL(run.begin(num_begun), -EBUSY);
    if (is_quiet)
        CHECK_EQUAL(tm_program_quiet(world.program), 0);
    const uint32_t in_buffers = num_begun < 3 ? num_begun : 3;
    run.go_on(in_buffers + (in_buffers > 0));
    CHECK_EQUAL(run.start(), -EINVAL); // one too many, or one that was never begun
    run.tiles[in_buffers].flags = 0;
    run.tiles[in_buffers].num_reads = run.tiles[in_buffers].num_checks = 1;
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 6; ++i)
        world.check_tile(i, true);
    CHECK_EQUAL(world.queue.counters().read_bytes, 6 * TILE);
}

// ---- reads that memory answers --------------------------------------------------------------------------------------

// The file and the checksums have other bytes than memory, so that the results tell which were stepped.
static void test_cached_bytes_are_not_read(uint32_t num_buffers) {
    World world(6);
    Run run(&world, num_buffers);
    std::vector<std::vector<char>> cached;
    for (uint32_t i = 0; i < 6; ++i)
        cached.push_back(world.first(i + 50));
    for (uint32_t i = 0; i < 6; i += 2)
        run.transfers[i].cached = cached[i].data();
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 0);
    CHECK_EQUAL(run.report().error, 0);
    for (uint32_t i = 0; i < 6; ++i) {
        std::vector<char> expected = i % 2 ? world.first(i) : cached[i];
        const tm_step step = world.step_of(i, expected.data());
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
        CHECK(world.get(i) == expected);
    }
    CHECK_EQUAL(world.queue.counters().read_bytes, 3 * TILE);
}

// With one buffer, which a caller holds, no other tile has begun.
static void test_forgotten_bytes_are_read() {
    World world(6);
    Run run(&world, 1);
    std::vector<std::vector<char>> cached;
    for (uint32_t i = 0; i < 6; ++i)
        cached.push_back(world.first(i));
    for (uint32_t i = 0; i < 6; ++i)
        run.transfers[i].cached = cached[i].data();
    run.tiles[0].flags = TM_TILE_BROUGHT;
    CHECK_EQUAL(run.start(), 0);
    uint64_t tile;
    int32_t buffer;
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 0);
    CHECK_EQUAL(tm_program_forget(world.program, 0), 0); // tiles 0 and 1
    CHECK_EQUAL(tm_program_forget(world.program, 2), 0); // tiles 4 and 5
    CHECK_EQUAL(tm_program_forget(world.program, 9), 0);
    for (uint32_t i : {0u, 1u, 4u, 5u})
        memset(cached[i].data(), 0x55, TILE);
    CHECK_EQUAL(tm_program_done(world.program, tile, 0), 0);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 6; ++i)
        world.check_tile(i, true);
    CHECK_EQUAL(world.queue.counters().read_bytes, 3 * TILE);
}

// The thread starts behind the call, so that what the run reads of begun tiles is due still.
static void test_forgotten_bytes_of_begun_tiles_are_read() {
    World world(2);
    CHECK_EQUAL(tm_program_close(world.program), 0);
    world.program = new tm_program(16 << 20);
    world.program->owner = getpid();
    Run run(&world, 2);
    std::vector<tm_transfer> early = run.transfers, late = run.transfers;
    std::vector<char> cached(WEIGHTS, 0x55);
    for (uint32_t i = 0; i < 2; ++i) {
        early[i].length = STATES;
        late[i] = {
            world.queue.q, run.memory.data + STATES, WEIGHTS, i * TILE + STATES, cached.data(), world.file.fd, 0};
        run.tiles[i].reads = &early[i];
        run.tiles[i].num_checks = 0;
    }
    CHECK_EQUAL(run.begin(2), 0);
    for (uint32_t i = 0; i < 2; ++i) {
        run.tiles[i].flags = TM_TILE_BEGUN;
        run.tiles[i].reads = &late[i];
        run.tiles[i].num_checks = 1;
    }
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(tm_program_forget(world.program, 0), 0);
    world.program->thread = std::thread(tm_program_serve, world.program);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 2; ++i)
        world.check_tile(i, true);
}

static void test_begun_tiles_are_dropped() {
    World world(6);
    Run run(&world, 3);
    CHECK_EQUAL(run.begin(3), 0);
    CHECK_EQUAL(tm_program_stop(world.program), 0);
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 6; ++i)
        world.check_tile(i, true);
}

static void test_a_begun_read_that_fails_ends_the_run() {
    World world(4, {{4, EIO, TM_FAULT_ERROR, 1}}); // a tile has four blocks
    Run run(&world, 2);
    CHECK_EQUAL(run.begin(2), 0);
    CHECK_EQUAL(tm_program_quiet(world.program), 0);
    run.go_on(2);
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 1);
    const tm_failure failure = run.report();
    CHECK_EQUAL(failure.error, EIO);
    CHECK_EQUAL(failure.during, TM_DURING_READ);
    CHECK_EQUAL(failure.tile, 1);
    for (uint32_t i = 0; i < 4; ++i)
        world.check_tile(i, false);
}

// ---- work that is not native ----------------------------------------------------------------------------------------

static void test_called_tiles_are_computed_by_callers() {
    World world(6);
    Run run(&world, 2);
    for (uint32_t i : {1u, 4u, 5u})
        run.tiles[i].flags = TM_TILE_CALLED;
    CHECK_EQUAL(run.start(), 0);
    std::vector<uint64_t> called;
    uint64_t tile;
    int32_t buffer;
    while (tm_program_next(world.program, -1, &tile, &buffer) == 0) {
        called.push_back(tile);
        const tm_step step = world.step_of((uint32_t)tile, (char *)run.buffers[(size_t)buffer]);
        CHECK_EQUAL(tm_optimizer_step(world.workers, &step), 0);
        CHECK_EQUAL(tm_program_done(world.program, called.back(), 0), 0);
    }
    CHECK(called == (std::vector<uint64_t>{1, 4, 5}) || called == (std::vector<uint64_t>{1, 5, 4}));
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 6; ++i)
        world.check_tile(i, true);
    CHECK_EQUAL(tm_program_done(world.program, 1, 0), -EINVAL);
}

static void test_a_caller_that_fails_ends_the_run() {
    World world(4);
    Run run(&world, 1);
    run.tiles[1].flags = TM_TILE_CALLED;
    CHECK_EQUAL(run.start(), 0);
    uint64_t tile;
    int32_t buffer;
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 0);
    CHECK_EQUAL(tm_program_done(world.program, tile, EIO), 0);
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 1);
    CHECK_EQUAL(run.report().tile, 1);
    for (uint32_t i = 0; i < 4; ++i)
        world.check_tile(i, i == 0);
}

// Their gradients are brought to the end of the buffer, which is not written.
static void test_brought_tiles_are_stepped_when_all_is_there(bool has_transfers) {
    const uint64_t room = TILE + 4 * NUMEL;
    const uint32_t num = 8;
    World world(num);
    Run run(&world, num);
    Memory memory(2 * room), states(num * TILE);
    void *buffers[2] = {memory.data, memory.data + room};
    for (uint32_t i = 0; i < num; ++i) {
        run.tiles[i].flags = TM_TILE_BROUGHT;
        run.transfers[i].buffer = run.pieces[i].data = memory.data;
        if (!has_transfers)
            memcpy(states.data + i * TILE, world.first(i).data(), TILE);
        run.steps[i] = world.step_of(i, has_transfers ? memory.data : states.data + i * TILE);
        run.steps[i].grad.data = memory.data + TILE;
        if (!has_transfers)
            run.tiles[i].num_reads = run.tiles[i].num_writes = run.tiles[i].num_checks = run.tiles[i].num_sums = 0;
    }
    CHECK_EQUAL(tm_program_run(world.program, nullptr, 0, 0, run.tiles.data(), num, num, TM_NORMAL, 0), -ENOBUFS);
    CHECK_EQUAL(tm_program_run(world.program, buffers, 2, room, run.tiles.data(), num, num, TM_NORMAL, 0), 0);
    CHECK_EQUAL(tm_program_await(world.program, 7, 1), -ETIMEDOUT); // all tiles of its unit are urgent now
    CHECK_EQUAL(tm_program_await(world.program, num, 1), -EINVAL);
    CHECK_EQUAL(tm_program_await(nullptr, 0, 1), -EINVAL);
    std::vector<uint64_t> brought;
    uint64_t tile;
    int32_t buffer;
    while (tm_program_next(world.program, -1, &tile, &buffer) == 0) {
        CHECK_EQUAL(tm_program_wait(world.program, (int64_t)(tile / 2), 0, 0), -ETIMEDOUT);
        memcpy((char *)buffers[buffer] + TILE, &world.grads[tile * NUMEL], 4 * NUMEL);
        CHECK_EQUAL(tm_program_await(world.program, tile, 0), -ETIMEDOUT);
        CHECK_EQUAL(tm_program_done(world.program, tile, 0), 0);
        CHECK_EQUAL(tm_program_await(world.program, tile, -1), 0);
        brought.push_back(tile);
    }
    CHECK_EQUAL(brought.size(), num);
    // Two tiles may have got the two buffers before the wait began, no more: the urgent ones come next.
    std::sort(brought.begin(), brought.begin() + 4);
    CHECK(brought[2] == 6 && brought[3] == 7);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < num; ++i)
        if (has_transfers)
            world.check_tile(i, true);
        else
            CHECK(std::vector<char>(states.data + i * TILE, states.data + (i + 1) * TILE) == world.stepped(i));
}

static void test_a_tile_that_is_not_brought_is_not_stepped() {
    World world(4);
    Run run(&world, 1);
    run.tiles[1].flags = TM_TILE_BROUGHT;
    CHECK_EQUAL(run.start(), 0);
    uint64_t tile;
    int32_t buffer;
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 0);
    CHECK_EQUAL(tm_program_done(world.program, tile, EIO), 0);
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 1);
    CHECK_EQUAL(run.report().during, TM_DURING_STEP);
    for (uint32_t i = 0; i < 4; ++i)
        world.check_tile(i, i == 0);
}

// ---- failures -------------------------------------------------------------------------------------------------------

// With one buffer the blocks are read and written in turn: 4 read, 4 written, 4 read, ...
static void test_a_transfer_that_fails_ends_the_run(uint64_t block, uint32_t num_stepped, int during,
                                                    uint32_t num_known) {
    World world(4, {{block, EIO, TM_FAULT_ERROR, 1}});
    Run run(&world, 1);
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 1);
    std::vector<tm_tile_times> times;
    const tm_failure failure = run.report(&times);
    CHECK_EQUAL(failure.error, EIO);
    CHECK_EQUAL(failure.during, during);
    CHECK_EQUAL(failure.tile, num_stepped);
    CHECK_EQUAL(failure.fd, world.file.fd);
    CHECK(failure.offset >= num_stepped * TILE && failure.offset + failure.length <= (num_stepped + 1) * TILE);
    for (uint32_t i = 0; i < 4; ++i) {
        CHECK_EQUAL(times[i].is_ended, i < num_stepped);
        CHECK_EQUAL(times[i].is_writing, i < num_known);
        CHECK_EQUAL(world.is_known[i], i < num_known ? 1 : 2);
        if (i != num_stepped)
            world.check_tile(i, i < num_stepped);
    }
}

static void test_unknown_checksums_are_not_compared_and_are_known_afterwards() {
    World world(4);
    Run run(&world, 2);
    for (uint32_t i : {1u, 2u}) {
        world.crcs[i] ^= 1;
        world.is_known[i] = 0;
    }
    CHECK_EQUAL(run.begin(2), 0);
    run.go_on(2);
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 0; i < 4; ++i) {
        world.check_tile(i, true);
        CHECK_EQUAL(world.crcs[i], crc_of(world.get(i)));
        CHECK_EQUAL(world.is_known[i], 1);
    }
}

// All tiles of a parameter point at one record, which the next step overwrites.
static void test_numbers_are_those_of_the_time_when_the_run_was_given() {
    World world(4);
    Run run(&world, 1);
    tm_step_numbers numbers = NUMBERS;
    for (tm_step &step : run.steps)
        step.numbers = &numbers;
    run.tiles[0].flags = TM_TILE_CALLED; // holds the buffer until it is done
    CHECK_EQUAL(run.start(), 0);
    numbers.scalars.step_size = 1;
    uint64_t tile;
    int32_t buffer;
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 0);
    CHECK_EQUAL(tm_program_done(world.program, tile, 0), 0);
    CHECK_EQUAL(run.wait(), 0);
    for (uint32_t i = 1; i < 4; ++i)
        world.check_tile(i, true);
}

static void test_damaged_bytes_are_never_stepped() {
    World world(4);
    Run run(&world, 2);
    const uint32_t before = world.crcs[2];
    world.crcs[2] ^= 1;
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 1);
    const tm_failure failure = run.report();
    CHECK_EQUAL(failure.error, EBADMSG);
    CHECK_EQUAL(failure.during, TM_DURING_CHECK);
    CHECK_EQUAL(failure.tile, 2);
    CHECK_EQUAL(failure.piece, 0);
    CHECK_EQUAL(failure.seen, before);
    CHECK_EQUAL(failure.num_wrong, 1);
    world.check_tile(2, false);
}

// A tile of several chunks, whose checksums do not end where its parts do; its weights may lie outside its buffer.
static void test_a_flipped_bit_ends_the_run(bool has_weights_outside) {
    const uint64_t n = 65536 + 3 * 32768 + 4096, states = 12 * n, num_bytes = 14 * n, piece_bytes = 100000;
    World world(1);
    Memory buffer(num_bytes), memory(num_bytes);
    Numbers numbers{3};
    for (uint64_t i = 0; i < 3 * n; ++i)
        ((float *)buffer.data)[i] = 0.5f + 0.4f * numbers.uniform();
    std::vector<char> weights(2 * n, 5), first(buffer.data, buffer.data + num_bytes);
    std::vector<float> grads(n, 0.25f);
    std::vector<tm_piece> checks, sums;
    std::vector<uint32_t> crcs(states / piece_bytes + 1), new_crcs(crcs.size(), 9);
    std::vector<uint8_t> is_known(crcs.size());
    for (uint64_t i = 0; i < crcs.size(); ++i) {
        const uint64_t begin = i * piece_bytes, bytes = begin + piece_bytes < states ? piece_bytes : states - begin;
        crcs[i] = crc_of(std::vector<char>(&first[begin], &first[begin] + bytes));
        checks.push_back({memory.data + begin, bytes, &crcs[i], nullptr});
        sums.push_back({memory.data + begin, bytes, &new_crcs[i], &is_known[i]});
    }
    tm_step step = world.step_of(0, memory.data);
    step.n = n;
    step.grad.data = grads.data();
    step.weight.data = has_weights_outside ? weights.data() : memory.data + states;
    step.moments[0].data = memory.data + 4 * n;
    step.moments[1].data = memory.data + 8 * n;
    const tm_step *steps[] = {&step};
    const tm_transfer transfer = {world.queue.q, memory.data, num_bytes, 0, nullptr, world.file.fd, 0};
    const uint32_t num = (uint32_t)checks.size();
    const tm_tile tile = {1,     0,           0,         1,       num, 1,       num, 1, 0, &transfer, checks.data(),
                          steps, sums.data(), &transfer, nullptr, 0,   nullptr, 0};
    void *buffers[] = {memory.data};
    tm_tile_times times;
    tm_failure failure;
    const auto run_with = [&](const std::vector<uint64_t> &flipped) {
        memcpy(buffer.data, first.data(), num_bytes);
        for (uint64_t byte : flipped)
            buffer.data[byte] ^= 8;
        CHECK_EQUAL(pwrite(world.file.fd, buffer.data, num_bytes, 0), num_bytes);
        CHECK_EQUAL(tm_program_run(world.program, buffers, 1, num_bytes, &tile, 1, 1, TM_NORMAL, 0), 0);
        CHECK_EQUAL(tm_program_wait(world.program, -1, 1, -1), !flipped.empty());
        CHECK_EQUAL(tm_program_report(world.program, &times, 1, &failure), 1);
        std::vector<char> bytes(buffer.data, buffer.data + num_bytes);
        CHECK_EQUAL(pread(world.file.fd, buffer.data, num_bytes, 0), num_bytes);
        CHECK_EQUAL(memcmp(bytes.data(), buffer.data, num_bytes) == 0, !flipped.empty());
        return bytes;
    };
    for (uint64_t part = 0; part < 3; ++part) // master, m and v: in the first, a middle and the last chunk
        for (uint64_t byte : {4 * n * part, 4 * n * part + 2 * n + 1, 4 * n * (part + 1) - 1}) {
            const std::vector<char> bytes = run_with({byte, byte ^ 1, byte < piece_bytes ? states - 1 : 2});
            const uint64_t place = byte < piece_bytes ? byte : 2, begin = place / piece_bytes * piece_bytes;
            CHECK_EQUAL(failure.error, EBADMSG);
            CHECK_EQUAL(failure.during, TM_DURING_CHECK);
            CHECK_EQUAL(failure.piece, place / piece_bytes);
            CHECK_EQUAL(failure.seen, crc_of(std::vector<char>(&bytes[begin], &bytes[begin] + piece_bytes)));
            CHECK_EQUAL(failure.num_wrong, 2);
            CHECK_EQUAL(times.written_bytes, 0);
            CHECK(times.is_ended == 0 && times.is_writing == 0 && times.step_ns[1] == 0);
            CHECK_EQUAL(times.check_ns[1] != 0, has_weights_outside);
            CHECK(new_crcs == std::vector<uint32_t>(crcs.size(), 9));
            CHECK(is_known == std::vector<uint8_t>(crcs.size()));
            CHECK(weights == std::vector<char>(2 * n, 5));
        }
    run_with({});
    CHECK_EQUAL(failure.error, 0);
    for (uint64_t i = 0; i < crcs.size(); ++i) {
        const uint64_t begin = i * piece_bytes;
        CHECK_EQUAL(new_crcs[i], crc_of(std::vector<char>(buffer.data + begin, buffer.data + begin + sums[i].bytes)));
        CHECK_EQUAL(is_known[i], 1);
    }
    CHECK_EQUAL(weights == std::vector<char>(2 * n, 5), !has_weights_outside);
    std::vector<char> twin = first;
    step.master.data = twin.data();
    step.weight.data = twin.data() + states;
    step.moments[0].data = twin.data() + 4 * n;
    step.moments[1].data = twin.data() + 8 * n;
    CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    CHECK_EQUAL(memcmp(twin.data(), buffer.data, states), 0);
    CHECK_EQUAL(memcmp(twin.data() + states, has_weights_outside ? weights.data() : buffer.data + states, 2 * n), 0);
}

static void test_a_step_that_is_refused_ends_the_run() {
    World world(3);
    Run run(&world, 1);
    run.steps[1].rule = 77;
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(run.wait(), 1);
    CHECK_EQUAL(run.report().error, EINVAL);
    CHECK_EQUAL(run.report().during, TM_DURING_STEP);
    for (uint32_t i = 0; i < 3; ++i)
        world.check_tile(i, i == 0);
}

static void test_a_stopped_run_leaves_whole_tiles() {
    World world(64);
    Run run(&world, 3);
    CHECK_EQUAL(run.start(), 0);
    CHECK_EQUAL(tm_program_wait(world.program, 3, 0, -1), 0);
    CHECK_EQUAL(tm_program_stop(world.program), 0);
    std::vector<tm_tile_times> times;
    CHECK_EQUAL(run.report(&times).error, 0);
    for (uint32_t i = 0; i < 64; ++i)
        world.check_tile(i, times[i].is_ended);
}

// ---- waiting and taking ---------------------------------------------------------------------------------------------

static void test_a_unit_that_is_awaited_goes_first() {
    World world(40);
    Run run(&world, 2);
    run.tiles[0].flags = TM_TILE_CALLED; // holds a buffer until it is done
    CHECK_EQUAL(run.start(TM_RUN_ONE_WRITE, TM_BACKGROUND), 0);
    uint64_t tile;
    int32_t buffer;
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 0);
    CHECK_EQUAL(tm_program_wait(world.program, 19, 1, 1), -ETIMEDOUT);
    CHECK_EQUAL(tm_program_wait(world.program, 19, 1, 0), -ETIMEDOUT);
    CHECK_EQUAL(tm_program_done(world.program, tile, 0), 0);
    CHECK_EQUAL(run.wait(), 0);
    std::vector<tm_tile_times> times;
    run.report(&times);
    for (uint32_t i = 4; i < 38; ++i)
        CHECK(times[38].step_ns[0] < times[i].step_ns[0] && times[39].step_ns[0] < times[i].step_ns[0]);
    CHECK_EQUAL(tm_program_wait(world.program, 19, 1, 0), 0);
    CHECK_EQUAL(tm_program_wait(world.program, 77, 1, 0), 0); // no tile is its
}

static void test_new_weights_are_taken_from_memory() {
    World world(6);
    Run run(&world, 2);
    std::vector<char> taken(WEIGHTS, 1), dropped(WEIGHTS, 1);
    run.tiles[0].flags = TM_TILE_CALLED; // nothing after tile 1 gets a buffer until it is done
    CHECK_EQUAL(run.start(TM_RUN_ONE_READ), 0);
    CHECK_EQUAL(tm_program_take(world.program, 5, taken.data()), 1);
    CHECK_EQUAL(tm_program_take(world.program, 4, dropped.data()), 1);
    CHECK_EQUAL(tm_program_take(world.program, 4, nullptr), 0);
    CHECK_EQUAL(tm_program_take(world.program, 9, nullptr), -EINVAL);
    uint64_t tile;
    int32_t buffer;
    CHECK_EQUAL(tm_program_next(world.program, -1, &tile, &buffer), 0);
    CHECK_EQUAL(tm_program_done(world.program, tile, 0), 0);
    CHECK_EQUAL(tm_program_wait(world.program, 2, 0, -1), 0);
    const std::vector<char> expected = world.stepped(5);
    CHECK(memcmp(taken.data(), expected.data() + STATES, WEIGHTS) == 0);
    CHECK(dropped == std::vector<char>(WEIGHTS, 1));
    CHECK_EQUAL(run.wait(), 0);
    CHECK_EQUAL(tm_program_take(world.program, 5, taken.data()), 0); // its buffer is free again
}

// Threads wait for units, take weights and look at reports while the program runs.
static void test_callers_on_many_threads() {
    World world(48);
    Run run(&world, 3);
    for (int round = 0; round < 5; ++round) {
        CHECK_EQUAL(run.start(0, TM_BACKGROUND), 0);
        std::vector<std::thread> threads;
        for (uint32_t number = 0; number < 3; ++number)
            threads.emplace_back([&world, number] {
                std::vector<char> weights(WEIGHTS);
                tm_failure failure;
                for (uint32_t unit = number; unit < 24; unit += 3) {
                    const int is_taken = tm_program_take(world.program, 2 * unit, weights.data());
                    CHECK(is_taken == 0 || is_taken == 1);
                    CHECK_EQUAL(tm_program_wait(world.program, unit, unit % 2, -1), 0);
                    CHECK_EQUAL(tm_program_take(world.program, 2 * unit, nullptr), 0);
                    CHECK(tm_program_report(world.program, nullptr, 0, &failure) >= 0);
                }
            });
        for (std::thread &thread : threads)
            thread.join();
        CHECK_EQUAL(run.wait(), 0);
    }
}

// ---- slots ----------------------------------------------------------------------------------------------------------

// The protocol of slots, as its caller keeps it: see tiermem.h.
struct Slots {
    static const uint32_t NUM = 4;
    World *world;
    std::mutex mutex; // guards what follows
    std::vector<uint32_t> current;
    std::vector<uint32_t> crcs; // of each tile's current slot
    std::vector<uint32_t> num_steps;
    std::vector<std::multiset<uint32_t>> held; // by freezes

    Slots(World *w, uint32_t num_tiles) : world(w), current(num_tiles), num_steps(num_tiles), held(num_tiles) {
        for (uint32_t i = 0; i < num_tiles; ++i) {
            world->put(i * NUM, world->first(i));
            crcs.push_back(world->crcs[i * NUM]);
        }
    }
    uint64_t place(uint32_t tile, uint32_t slot) const { return (tile * NUM + slot) * TILE; }
    uint32_t apart(uint32_t tile) {
        std::lock_guard<std::mutex> guard(mutex);
        uint32_t slot = 0;
        while (slot == current[tile] || held[tile].count(slot))
            ++slot;
        return slot;
    }
    // A freeze of one tile reads it, with the checksum that it had then, however often it has been stepped since.
    void look(uint32_t tile) {
        Memory memory(TILE);
        uint32_t slot, crc;
        {
            std::lock_guard<std::mutex> guard(mutex);
            slot = current[tile];
            crc = crcs[tile];
            held[tile].insert(slot);
        }
        std::this_thread::yield();
        CHECK_EQUAL(pread(world->file.fd, memory.data, TILE, (off_t)place(tile, slot)), TILE);
        CHECK_EQUAL(crc_of(std::vector<char>(memory.data, memory.data + TILE)), crc);
        std::lock_guard<std::mutex> guard(mutex);
        held[tile].erase(held[tile].find(slot));
    }
};

// Speculative runs write beside what rests; some are noted and some dropped, while other threads freeze, read and thaw.
static void test_slots_move_while_others_read_them(uint32_t seed) {
    const uint32_t num_tiles = 5;
    World world(num_tiles * Slots::NUM);
    Slots slots(&world, num_tiles);
    Run run(&world, 2);
    run.tiles.resize(num_tiles);
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (uint32_t thread = 0; thread < 2; ++thread)
        threads.emplace_back([&, thread] {
            for (uint32_t i = thread; !is_over; ++i)
                slots.look(i % num_tiles);
        });
    Numbers numbers{seed};
    std::vector<tm_transfer> reads, writes;
    std::vector<tm_piece> checks, sums;
    std::vector<uint32_t> targets(num_tiles), apart(num_tiles), checked(num_tiles);
    for (int round = 0; round < 12; ++round) {
        const bool is_dropped = numbers.next() % 3 == 0;
        reads.clear();
        writes.clear();
        checks.clear();
        sums.clear();
        for (uint32_t i = 0; i < num_tiles; ++i) {
            targets[i] = slots.apart(i);
            checked[i] = slots.crcs[i];
            tm_transfer transfer = run.transfers[i];
            transfer.offset = slots.place(i, slots.current[i]);
            reads.push_back(transfer);
            transfer.offset = slots.place(i, targets[i]);
            writes.push_back(transfer);
            checks.push_back({run.memory.data, TILE, &checked[i], nullptr});
            sums.push_back({run.memory.data, TILE, &apart[i], nullptr});
        }
        for (uint32_t i = 0; i < num_tiles; ++i) {
            run.tiles[i].reads = &reads[i];
            run.tiles[i].writes = &writes[i];
            run.tiles[i].checks = &checks[i];
            run.tiles[i].sums = &sums[i];
        }
        CHECK_EQUAL(run.start(), 0);
        if (is_dropped) {
            CHECK_EQUAL(tm_program_wait(world.program, numbers.next() % 3, 0, -1), 0);
            CHECK_EQUAL(tm_program_stop(world.program), 0);
            continue;
        }
        CHECK_EQUAL(run.wait(), 0);
        std::lock_guard<std::mutex> guard(slots.mutex);
        for (uint32_t i = 0; i < num_tiles; ++i) {
            slots.current[i] = targets[i];
            slots.crcs[i] = apart[i];
            ++slots.num_steps[i];
        }
    }
    is_over = true;
    for (std::thread &thread : threads)
        thread.join();
    for (uint32_t i = 0; i < num_tiles; ++i) {
        std::vector<char> bytes = world.first(i);
        const tm_step step = world.step_of(i, bytes.data());
        for (uint32_t k = 0; k < slots.num_steps[i]; ++k)
            CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
        CHECK(world.get(i * Slots::NUM + slots.current[i]) == bytes);
    }
}

int main() {
    for (int engine : find_engines())
        for (uint32_t num_buffers : {1u, 2u, 4u, 9u})
            for (uint32_t flags : {0u, (uint32_t)TM_RUN_ONE_READ, (uint32_t)TM_RUN_ONE_WRITE, (uint32_t)TM_RUN_AWAITED})
                RUN(test_every_tile_is_stepped_once, engine, num_buffers, flags);
    RUN(test_tiles_in_memory_need_no_buffer);
    RUN(test_a_run_of_nothing_ends);
    RUN(test_runs_follow_each_other);
    RUN(test_begun_tiles_go_on_in_the_run, 1, false);
    RUN(test_begun_tiles_go_on_in_the_run, 2, true);
    RUN(test_begun_tiles_go_on_in_the_run, 6, false);
    RUN(test_tiles_are_added_while_the_run_goes_on, 0, 0);
    RUN(test_tiles_are_added_while_the_run_goes_on, 5, 0);
    RUN(test_tiles_are_added_while_the_run_goes_on, 2, 2);
    RUN(test_tiles_are_read_by_their_turns);
    RUN(test_a_run_that_never_gets_its_rest_is_stopped);
    RUN(test_begun_tiles_are_dropped);
    RUN(test_cached_bytes_are_not_read, 1);
    RUN(test_cached_bytes_are_not_read, 4);
    RUN(test_forgotten_bytes_are_read);
    RUN(test_forgotten_bytes_of_begun_tiles_are_read);
    RUN(test_a_begun_read_that_fails_ends_the_run);
    RUN(test_called_tiles_are_computed_by_callers);
    RUN(test_a_caller_that_fails_ends_the_run);
    RUN(test_brought_tiles_are_stepped_when_all_is_there, true);
    RUN(test_brought_tiles_are_stepped_when_all_is_there, false);
    RUN(test_a_tile_that_is_not_brought_is_not_stepped);
    RUN(test_a_transfer_that_fails_ends_the_run, 2, 0, TM_DURING_READ, 0);
    RUN(test_a_transfer_that_fails_ends_the_run, 5, 0, TM_DURING_WRITE, 1);
    RUN(test_a_transfer_that_fails_ends_the_run, 10, 1, TM_DURING_READ, 1);
    RUN(test_a_transfer_that_fails_ends_the_run, 29, 3, TM_DURING_WRITE, 4);
    RUN(test_unknown_checksums_are_not_compared_and_are_known_afterwards);
    RUN(test_numbers_are_those_of_the_time_when_the_run_was_given);
    RUN(test_damaged_bytes_are_never_stepped);
    RUN(test_a_flipped_bit_ends_the_run, false);
    RUN(test_a_flipped_bit_ends_the_run, true);
    RUN(test_a_step_that_is_refused_ends_the_run);
    RUN(test_a_stopped_run_leaves_whole_tiles);
    RUN(test_a_unit_that_is_awaited_goes_first);
    RUN(test_new_weights_are_taken_from_memory);
    RUN(test_callers_on_many_threads);
    for (uint32_t seed = 0; seed < 3; ++seed)
        RUN(test_slots_move_while_others_read_them, seed);
    return 0;
}
