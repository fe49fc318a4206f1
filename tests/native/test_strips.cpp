// Does a program step tiles in strips to the bit of the kernel alone, and is each strip whole or untouched after a
// failure?

#include <algorithm>
#include <thread>

#include "fixture.h"

// A tile is cut in four strips and a half, and so are its two parameters; behind each there is padding.
static const tm_step_numbers NUMBERS = {3, {1e-2, 0.99, 1.0, 0.9, 0.99, 1e-8, 1.5, 0, 0, 0}};
static const uint64_t NUMEL = 9216, STRIP = 2048, NUM_STRIPS = 5;
static const uint64_t BEGINS[] = {0, 3072}, ENDS[] = {3008, 9152};

// Columns: master, momentum, variance with its scales, weights, gradients; the file has them in this order.
struct Kind {
    int32_t dtype;
    uint64_t bytes, numel; // so many bytes for so many elements
};
static const Kind KINDS[] = {{TM_F32, 4, 1},   {TM_BF16, 2, 1}, {TM_Q8_POSITIVE, 1, 1},
                             {TM_NONE, 1, 64}, {TM_BF16, 2, 1}, {TM_F32, 4, 1}};
enum { MASTER, FIRST, SECOND, SCALES, WEIGHT, GRAD, NUM_COLUMNS };

static uint64_t place_of(int column, uint64_t element = 0) {
    uint64_t place = 0;
    for (int i = 0; i < column; ++i)
        place += NUMEL / KINDS[i].numel * KINDS[i].bytes;
    return element ? place + (element - 1) / KINDS[column].numel * KINDS[column].bytes + KINDS[column].bytes : place;
}
static const uint64_t WEIGHTS = 2 * NUMEL;
static const uint64_t WRITTEN = place_of(GRAD), TILE = place_of(NUM_COLUMNS);

static tm_step step_of(uint32_t tile, int param, char *buffer) {
    const auto part = [&](int column) {
        return tm_part{buffer + place_of(column, BEGINS[param]), nullptr, KINDS[column].dtype, 0};
    };
    tm_step step = {};
    step.n = ENDS[param] - BEGINS[param];
    step.weight = part(WEIGHT);
    step.master = part(MASTER);
    step.grad = part(GRAD);
    step.moments[0] = part(FIRST);
    step.moments[1] = part(SECOND);
    step.moments[1].scales = (uint8_t *)buffer + place_of(SCALES, BEGINS[param]);
    step.key = 77 + param;
    step.first_element = tile * NUMEL;
    step.rule = TM_ADAMW;
    step.rounding = TM_STOCHASTIC;
    step.numbers = &NUMBERS;
    return step;
}

static std::vector<char> first(uint32_t tile) {
    std::vector<char> bytes(TILE);
    Numbers numbers{100 + tile};
    for (char &byte : bytes)
        byte = (char)(numbers.next() % 64); // small numbers in every format
    for (uint64_t i = 0; i < NUMEL; ++i) {
        ((float *)&bytes[place_of(MASTER)])[i] = numbers.uniform();
        ((float *)&bytes[place_of(GRAD)])[i] = numbers.uniform();
    }
    return bytes;
}

static std::vector<char> stepped(uint32_t tile, uint32_t flags = 0) {
    std::vector<char> bytes = first(tile);
    for (int param = 0; param < 2; ++param) {
        tm_step step = step_of(tile, param, bytes.data());
        step.flags = flags;
        CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
    }
    return bytes;
}

static uint32_t crc_of(const char *bytes, uint64_t length) {
    const void *piece = bytes;
    uint32_t crc;
    CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, &length, &crc), 0);
    return crc;
}

// What a column has of a strip: where, and how many bytes.
static uint64_t strip_of(int column, uint64_t strip, uint64_t *bytes) {
    const uint64_t begin = strip * STRIP, end = std::min(NUMEL, begin + STRIP);
    *bytes = place_of(column, end) - place_of(column, begin);
    return place_of(column, begin);
}

// Tiles in a file, their buffers, and their pieces: one of each column but the gradients in each strip, two where two
// parameters are.
struct World {
    struct Tile {
        std::vector<tm_transfer> reads, writes;
        std::vector<tm_piece> pieces;
        std::vector<tm_step> steps;
        std::vector<const tm_step *> pointers;
        std::vector<uint32_t> crcs;
    };
    uint32_t num_tiles;
    File file{false};
    Queue queue;
    Memory memory;
    std::vector<void *> buffers;
    std::vector<tm_column> columns;
    std::vector<Tile> given;
    std::vector<tm_tile> tiles;
    tm_workers *workers = nullptr;
    tm_program *program = nullptr;

    World(uint32_t num, uint32_t num_buffers, std::vector<tm_fault> faults = {}, int engine = TM_ENGINE_AUTO,
          uint64_t least_bytes = 16 << 20)
        : num_tiles(num), queue(engine, 8, 4096, faults), memory(num_buffers * TILE), given(num) {
        CHECK(queue.is_open);
        CHECK_EQUAL(tm_workers_open(2, &workers), 0);
        CHECK_EQUAL(tm_program_open(workers, least_bytes, &program), 0);
        for (uint32_t i = 0; i < num_buffers; ++i)
            buffers.push_back(memory.data + i * TILE);
        for (int column = 0; column < NUM_COLUMNS; ++column) {
            uint64_t bytes;
            strip_of(column, 0, &bytes);
            columns.push_back({memory.data + place_of(column), place_of(column, NUMEL) - place_of(column), bytes});
        }
        for (uint32_t i = 0; i < num; ++i)
            describe(i);
    }
    ~World() {
        CHECK_EQUAL(tm_program_close(program), 0);
        CHECK_EQUAL(tm_workers_close(workers), 0);
    }

    // The file and the sums as they were before any step.
    void reset() {
        for (uint32_t i = 0; i < num_tiles; ++i) {
            const std::vector<char> bytes = first(i);
            CHECK_EQUAL(pwrite(file.fd, bytes.data(), TILE, (off_t)(i * TILE)), TILE);
            for (size_t k = 0; k < given[i].pieces.size(); ++k) {
                const tm_piece &piece = given[i].pieces[k];
                given[i].crcs[k] = crc_of(&bytes[(size_t)((char *)piece.data - memory.data)], piece.bytes);
            }
        }
    }

    // Two reads, of which one ends inside a column and inside a strip, and two writes that meet there.
    void describe(uint32_t i) {
        const std::vector<char> bytes = first(i);
        CHECK_EQUAL(pwrite(file.fd, bytes.data(), TILE, (off_t)(i * TILE)), TILE);
        Tile *tile = &given[i];
        const uint64_t cut = place_of(FIRST, 3000);
        const auto transfer = [&](uint64_t begin, uint64_t end) {
            return tm_transfer{queue.q, memory.data + begin, end - begin, i * TILE + begin, nullptr, file.fd, 0};
        };
        tile->reads = {transfer(0, cut), transfer(cut, TILE)};
        tile->writes = {transfer(0, cut), transfer(cut, WRITTEN)};
        for (int param = 0; param < 2; ++param)
            tile->steps.push_back(step_of(i, param, memory.data));
        for (const tm_step &step : tile->steps)
            tile->pointers.push_back(&step);
        for (int column = 0; column < GRAD; ++column)
            for (uint64_t begin = 0, end; begin < NUMEL; begin = end) {
                end = std::min({NUMEL, (begin / STRIP + 1) * STRIP, begin < ENDS[0] ? ENDS[0] : NUMEL});
                const uint64_t place = place_of(column, begin), length = place_of(column, end) - place;
                tile->pieces.push_back({memory.data + place, length, nullptr, nullptr});
                tile->crcs.push_back(crc_of(&bytes[place], length));
            }
        for (size_t k = 0; k < tile->pieces.size(); ++k)
            tile->pieces[k].crc = &tile->crcs[k];
        const uint32_t num = (uint32_t)tile->pieces.size();
        tiles.push_back({1000 + i, i / 2, 0, 2, num, 2, num, 2, 0, tile->reads.data(), tile->pieces.data(),
                         tile->pointers.data(), tile->pieces.data(), tile->writes.data(),
                         memory.data + place_of(WEIGHT), WEIGHTS, columns.data(), NUM_COLUMNS});
    }
    int start(uint32_t flags = 0) {
        return tm_program_run(program, buffers.data(), (uint32_t)buffers.size(), TILE, tiles.data(), num_tiles,
                              num_tiles, TM_NORMAL, flags);
    }
    int wait() { return tm_program_wait(program, -1, 1, -1); }
    tm_failure report(std::vector<tm_tile_times> *times) {
        tm_failure failure;
        times->resize(num_tiles);
        CHECK_EQUAL(tm_program_report(program, times->data(), num_tiles, &failure), (int)num_tiles);
        return failure;
    }
    std::vector<char> get(uint32_t tile) {
        std::vector<char> bytes(TILE);
        CHECK_EQUAL(pread(file.fd, bytes.data(), TILE, (off_t)(tile * TILE)), TILE);
        return bytes;
    }
    void check_sums(uint32_t tile, const std::vector<char> &bytes) {
        for (size_t k = 0; k < given[tile].pieces.size(); ++k) {
            const tm_piece &piece = given[tile].pieces[k];
            CHECK_EQUAL(given[tile].crcs[k], crc_of(&bytes[(size_t)((char *)piece.data - memory.data)], piece.bytes));
        }
    }
    // Whether a strip of the file is stepped; what it holds is that, or what was there first.
    bool is_stepped(uint32_t tile, uint64_t strip) {
        const std::vector<char> bytes = get(tile), old = first(tile), now = stepped(tile);
        bool is_old = true, is_new = true;
        for (int column = 0; column < GRAD; ++column) {
            uint64_t length;
            const uint64_t place = strip_of(column, strip, &length);
            is_old &= memcmp(&bytes[place], &old[place], length) == 0;
            is_new &= memcmp(&bytes[place], &now[place], length) == 0;
        }
        CHECK(is_old != is_new);
        return is_new;
    }
};

static void test_strips_have_the_bits_of_whole_tiles(int engine, uint32_t num_buffers, uint32_t flags) {
    World world(6, num_buffers, {}, engine);
    world.tiles[4].num_columns = 0; // a whole tile between others
    std::vector<std::vector<char>> taken(6, std::vector<char>(WEIGHTS));
    CHECK_EQUAL(world.start(flags), 0);
    std::vector<int> is_taken;
    for (uint32_t i = 0; i < 6; ++i)
        is_taken.push_back(tm_program_take(world.program, i, taken[i].data()));
    CHECK_EQUAL(world.wait(), 0);
    std::vector<tm_tile_times> times;
    CHECK_EQUAL(world.report(&times).error, 0);
    for (uint32_t i = 0; i < 6; ++i) {
        const std::vector<char> expected = stepped(i);
        CHECK(world.get(i) == expected);
        world.check_sums(i, expected);
        CHECK(!is_taken[i] || memcmp(taken[i].data(), &expected[place_of(WEIGHT)], WEIGHTS) == 0);
        CHECK_EQUAL(times[i].is_ended, 1);
        CHECK_EQUAL(times[i].read_bytes, TILE);
        CHECK_EQUAL(times[i].written_bytes, WRITTEN);
        CHECK(times[i].read_ns[0] <= times[i].step_ns[0] && times[i].step_ns[1] <= times[i].write_ns[1]);
    }
    CHECK_EQUAL(world.queue.counters().written_bytes, 6 * WRITTEN);
}

static void test_cached_bytes_are_cut_too() {
    World world(3, 2);
    std::vector<char> cached = first(1);
    world.given[1].reads[1].cached = &cached[place_of(FIRST, 3000)];
    std::vector<char> nothing(TILE, 3);
    const uint64_t begin = place_of(GRAD);
    CHECK_EQUAL(pwrite(world.file.fd, nothing.data(), TILE - begin, (off_t)(TILE + begin)), TILE - begin);
    CHECK_EQUAL(world.start(), 0);
    CHECK_EQUAL(world.wait(), 0);
    const std::vector<char> found = world.get(1), expected = stepped(1);
    CHECK(memcmp(found.data(), expected.data(), WRITTEN) == 0);
    CHECK_EQUAL(world.queue.counters().read_bytes, 2 * TILE + place_of(FIRST, 3000));
}

// Weights and a moment rest in memory, where they are read in one place and written in another.
static void test_memory_beside_is_cut_too() {
    World world(2, 1);
    std::vector<char> before = first(1), now(TILE, 9);
    const std::vector<char> read = before;
    for (int param = 0; param < 2; ++param) {
        tm_step *step = &world.given[1].steps[(size_t)param];
        const tm_step there = step_of(1, param, now.data()), source = step_of(1, param, before.data());
        step->weight = there.weight;
        step->moments[1] = there.moments[1];
        step->sources[0] = source.weight.data;
        step->sources[3] = source.moments[1].data;
        step->source_scales[3] = source.moments[1].scales;
    }
    CHECK_EQUAL(world.start(), 0);
    CHECK_EQUAL(world.wait(), 0);
    std::vector<char> expected = stepped(1), in_file = world.get(1), unchanged = first(1);
    CHECK(before == read);
    for (int column : {SECOND, SCALES, WEIGHT}) {
        const uint64_t place = place_of(column), bytes = place_of(column + 1) - place;
        CHECK(memcmp(&in_file[place], &unchanged[place], bytes) == 0);
        for (int param = 0; param < 2; ++param) {
            const uint64_t begin = place_of(column, BEGINS[param]), length = place_of(column, ENDS[param]) - begin;
            CHECK(memcmp(&now[begin], &expected[begin], length) == 0);
        }
        memcpy(&in_file[place], &expected[place], bytes);
    }
    CHECK(in_file == expected);
}

// As many runs as the pace takes to try each setting: one, two and two of five strips are moved at once. Steps whose
// moments begin tell nothing of later ones: no other setting is tried.
static void test_strips_that_are_moved_together_have_the_same_bits(uint32_t step_flags) {
    World world(6, 4, {}, TM_ENGINE_AUTO, 32 << 10);
    const bool is_tried = step_flags == 0;
    for (World::Tile &tile : world.given)
        for (tm_step &step : tile.steps)
            step.flags = step_flags;
    std::vector<std::vector<char>> taken(6, std::vector<char>(WEIGHTS));
    uint64_t fewest_blocks = UINT64_MAX, most_blocks = 0;
    for (int round = 0; round < 64; ++round) {
        world.reset();
        const uint64_t before = world.queue.counters().blocks;
        CHECK_EQUAL(world.start(), 0);
        std::vector<int> is_taken;
        for (uint32_t i = 0; i < 6; ++i)
            is_taken.push_back(tm_program_take(world.program, i, taken[i].data()));
        CHECK_EQUAL(world.wait(), 0);
        for (uint32_t i = 0; i < 6; ++i) {
            const std::vector<char> expected = stepped(i, step_flags);
            CHECK(world.get(i) == expected);
            world.check_sums(i, expected);
            CHECK(!is_taken[i] || memcmp(taken[i].data(), &expected[place_of(WEIGHT)], WEIGHTS) == 0);
        }
        fewest_blocks = std::min(fewest_blocks, world.queue.counters().blocks - before);
        most_blocks = std::max(most_blocks, world.queue.counters().blocks - before);
    }
    CHECK_EQUAL(fewest_blocks < most_blocks, is_tried);
}

// Called tiles have buffers of their own, which come back to strips, and the other way round.
static void test_called_tiles_between_strips(uint32_t num_buffers) {
    World world(8, num_buffers);
    for (uint32_t i : {0u, 3u, 4u})
        world.tiles[i].flags = TM_TILE_CALLED;
    CHECK_EQUAL(world.start(), 0);
    uint64_t tile;
    int32_t buffer;
    for (int code; (code = tm_program_next(world.program, -1, &tile, &buffer)) != 1;) {
        CHECK_EQUAL(code, 0);
        for (int param = 0; param < 2; ++param) {
            const tm_step step = step_of((uint32_t)tile, param, (char *)world.buffers[(size_t)buffer]);
            CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
        }
        CHECK_EQUAL(tm_program_done(world.program, tile, 0), 0);
    }
    CHECK_EQUAL(world.wait(), 0);
    for (uint32_t i = 0; i < 8; ++i)
        CHECK(world.get(i) == stepped(i));
}

static void test_a_flipped_bit_leaves_its_strip(uint64_t strip, int column, uint32_t num_buffers) {
    World world(3, num_buffers);
    uint64_t length;
    const uint64_t place = strip_of(column, strip, &length) + length - 1, in_file = TILE + place;
    char byte;
    CHECK_EQUAL(pread(world.file.fd, &byte, 1, (off_t)in_file), 1);
    byte ^= 16;
    CHECK_EQUAL(pwrite(world.file.fd, &byte, 1, (off_t)in_file), 1);
    CHECK_EQUAL(world.start(), 0);
    CHECK_EQUAL(world.wait(), 1);
    std::vector<tm_tile_times> times;
    const tm_failure failure = world.report(&times);
    CHECK_EQUAL(failure.error, EBADMSG);
    CHECK_EQUAL(failure.during, TM_DURING_CHECK);
    CHECK_EQUAL(failure.tile, 1);
    CHECK_EQUAL(failure.num_wrong, 1);
    const tm_piece &piece = world.given[1].pieces[failure.piece];
    const uint64_t begin = (uint64_t)((char *)piece.data - world.memory.data);
    CHECK(begin <= place && place < begin + piece.bytes);
    const std::vector<char> found = world.get(1);
    CHECK_EQUAL(failure.seen, crc_of(&found[begin], piece.bytes));
    CHECK_EQUAL(found[place], byte);
    byte ^= 16;
    CHECK_EQUAL(pwrite(world.file.fd, &byte, 1, (off_t)in_file), 1);
    CHECK(!world.is_stepped(1, strip));
    uint64_t num_stepped = 0;
    for (uint64_t i = 0; i < NUM_STRIPS; ++i)
        num_stepped += world.is_stepped(1, i);
    CHECK_EQUAL(times[1].is_ended, 0);
    CHECK_EQUAL(times[1].is_writing, num_stepped > 0);
    if (times[0].is_ended)
        CHECK(world.get(0) == stepped(0));
}

static void test_a_transfer_that_fails_ends_the_run(uint64_t block) {
    World world(4, 2, {{block, EIO, TM_FAULT_ERROR, 1}});
    CHECK_EQUAL(world.start(), 0);
    CHECK_EQUAL(world.wait(), 1);
    std::vector<tm_tile_times> times;
    const tm_failure failure = world.report(&times);
    CHECK_EQUAL(failure.error, EIO);
    CHECK(failure.offset >= failure.tile * TILE && failure.offset + failure.length <= (failure.tile + 1) * TILE);
    CHECK_EQUAL(times[failure.tile].is_ended, 0);
    for (uint32_t i = 0; i < 4; ++i) {
        if (times[i].is_ended)
            CHECK(world.get(i) == stepped(i));
        if (!times[i].is_writing)
            CHECK(world.get(i) == first(i));
        CHECK_EQUAL(times[i].is_ended, times[i].written_bytes == WRITTEN);
    }
}

static void test_columns_that_are_no_table_are_refused() {
    World world(2, 1);
    const std::vector<tm_column> columns = world.columns;
    const auto is_refused = [&](int column, tm_column wrong) {
        world.columns[(size_t)column] = wrong;
        CHECK_EQUAL(world.start(), -EINVAL);
        world.columns = columns;
        for (tm_tile &tile : world.tiles)
            tile.columns = world.columns.data();
    };
    const tm_column master = columns[MASTER], weight = columns[WEIGHT], scales = columns[SCALES];
    is_refused(MASTER, {master.data, master.bytes, 0});
    is_refused(MASTER, {master.data, master.bytes, master.strip_bytes / 2});       // another number of strips
    is_refused(MASTER, {world.memory.data - 1, master.bytes, master.strip_bytes}); // outside the buffer
    is_refused(GRAD, {columns[GRAD].data, columns[GRAD].bytes + 4, columns[GRAD].strip_bytes});
    is_refused(WEIGHT, {weight.data, weight.bytes - 2, weight.strip_bytes}); // a read has more
    is_refused(SCALES, {scales.data, scales.bytes, scales.strip_bytes - 1}); // pieces lie in two strips
    tm_piece *piece = &world.given[0].pieces[0];                             // ends where its strip does
    ++piece->bytes;
    CHECK_EQUAL(world.start(), -EINVAL);
    --piece->bytes;
    world.tiles[0].columns = nullptr;
    CHECK_EQUAL(world.start(), -EINVAL);
    world.tiles[0].columns = columns.data();
    world.tiles[1].weight_bytes = TILE; // more than the columns hold
    CHECK_EQUAL(world.start(), -EINVAL);
    world.tiles[1].weight_bytes = WEIGHTS;
    world.given[1].steps[1].master.data = world.given[1].steps[1].weight.data = nullptr;
    world.given[1].steps[1].grad.data = nullptr;
    world.given[1].steps[1].moments[0].data = world.given[1].steps[1].moments[1].data = nullptr;
    CHECK_EQUAL(world.start(), -EINVAL); // no part lies in a column
    world.given[1].steps[1] = step_of(1, 1, world.memory.data);
    CHECK_EQUAL(world.start(), 0);
    CHECK_EQUAL(world.wait(), 0);
    CHECK(world.get(1) == stepped(1));
}

// Threads take weights at any moment: from a buffer before or after the step, or else they are in the file.
static void test_weights_are_taken_at_any_moment() {
    World world(24, 2);
    for (int round = 0; round < 6; ++round) {
        world.reset();
        CHECK_EQUAL(world.start(round % 2 ? (uint32_t)TM_RUN_AWAITED : 0u), 0);
        std::vector<std::thread> threads;
        for (uint32_t number = 0; number < 3; ++number)
            threads.emplace_back([&world, number] {
                for (uint32_t i = number; i < 24; i += 3) {
                    std::vector<char> weights(WEIGHTS);
                    if (tm_program_take(world.program, i, weights.data()) == 0)
                        memcpy(weights.data(), &world.get(i)[place_of(WEIGHT)], WEIGHTS);
                    else
                        CHECK_EQUAL(tm_program_await(world.program, i, -1), 0);
                    CHECK(memcmp(weights.data(), &stepped(i)[place_of(WEIGHT)], WEIGHTS) == 0);
                }
            });
        for (std::thread &thread : threads)
            thread.join();
        CHECK_EQUAL(world.wait(), 0);
    }
}

static void test_a_stopped_run_leaves_whole_strips() {
    for (int round = 0; round < 8; ++round) {
        World world(12, 1);
        CHECK_EQUAL(world.start(), 0);
        CHECK_EQUAL(tm_program_wait(world.program, round / 2, 1, -1), 0);
        CHECK_EQUAL(tm_program_stop(world.program), 0);
        std::vector<tm_tile_times> times;
        CHECK_EQUAL(world.report(&times).error, 0);
        for (uint32_t i = 0; i < 12; ++i) {
            uint64_t num_stepped = 0;
            for (uint64_t strip = 0; strip < NUM_STRIPS; ++strip)
                num_stepped += world.is_stepped(i, strip);
            CHECK_EQUAL(times[i].is_ended, num_stepped == NUM_STRIPS);
            CHECK_EQUAL(times[i].is_writing, num_stepped > 0);
        }
    }
}

int main() {
    for (int engine : find_engines())
        for (uint32_t num_buffers : {1u, 2u, 5u})
            for (uint32_t flags : {0u, (uint32_t)TM_RUN_ONE_READ, (uint32_t)TM_RUN_ONE_WRITE, (uint32_t)TM_RUN_AWAITED})
                RUN(test_strips_have_the_bits_of_whole_tiles, engine, num_buffers, flags);
    for (uint32_t step_flags : {0u, (uint32_t)TM_STEP_START_MOMENTS})
        RUN(test_strips_that_are_moved_together_have_the_same_bits, step_flags);
    RUN(test_cached_bytes_are_cut_too);
    RUN(test_memory_beside_is_cut_too);
    for (uint32_t num_buffers : {1u, 2u, 3u})
        RUN(test_called_tiles_between_strips, num_buffers);
    for (uint32_t num_buffers : {1u, 3u})
        for (uint64_t strip : {0u, 2u, 4u})
            for (int column : {MASTER, SCALES, WEIGHT})
                RUN(test_a_flipped_bit_leaves_its_strip, strip, column, num_buffers);
    for (uint64_t block : {0u, 9u, 40u, 77u, 160u, 201u})
        RUN(test_a_transfer_that_fails_ends_the_run, block);
    RUN(test_columns_that_are_no_table_are_refused);
    RUN(test_weights_are_taken_at_any_moment);
    RUN(test_a_stopped_run_leaves_whole_strips);
    return 0;
}
