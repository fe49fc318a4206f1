// Does one pass give the bits and the checksums of a check, steps and a sum that follow one another, however pieces lie
// to the elements of the steps; and does it see each flipped bit?

#include <algorithm>
#include <errno.h>
#include <numeric>
#include <string.h>
#include <vector>

#include "check.h"
#include "dtype.h"
#include "pass.h"

struct Kind {
    int rule, weight, master, grad, moments[3], rounding;
};

static const tm_step_numbers NUMBERS = {3, {1e-2, 0.99, 1.0, 0.9, 0.99, 1e-8, 1.5, 0.9, 0, 0}};
static const Kind EXACT = {TM_ADAMW, TM_BF16, TM_F32, TM_BF16, {TM_F32, TM_F32, TM_NONE}, TM_NEAREST};
static const Kind COMPACT = {TM_ADAMW, TM_BF16, TM_SPLIT, TM_F32, {TM_BF16, TM_BF16, TM_NONE}, TM_STOCHASTIC};
static const Kind TINY = {TM_ADAM, TM_BF16, TM_SPLIT, TM_BF16, {TM_Q8, TM_Q8_POSITIVE, TM_NONE}, TM_STOCHASTIC};
static const Kind LARGEST = {TM_ADAMW, TM_F16, TM_F32, TM_F16, {TM_Q8, TM_Q8_POSITIVE, TM_Q8_POSITIVE}, TM_STOCHASTIC};
static const Kind LION = {TM_LION, TM_F32, TM_NONE, TM_F32, {TM_BF16, TM_NONE, TM_NONE}, TM_NEAREST};
static const Kind SGD = {TM_SGD, TM_BF16, TM_NONE, TM_BF16, {TM_NONE, TM_NONE, TM_NONE}, TM_NEAREST};

static const uint64_t CHUNK = 1 << 15; // of pass.cpp

struct Sums {
    std::vector<const void *> pieces;
    std::vector<uint64_t> bytes;
    std::vector<uint32_t> crcs;

    void add(const void *piece, uint64_t length) {
        pieces.push_back(piece);
        bytes.push_back(length);
        crcs.push_back(77);
    }
    // Pieces of any length and alignment, one behind the other, with a gap here and there.
    void cut(const char *data, uint64_t length, uint64_t seed, uint64_t most) {
        Numbers numbers{seed};
        for (uint64_t at = 0; at < length;) {
            const uint64_t rest = length - at, wanted = numbers.next() % (numbers.next() % 4 ? most : 70);
            if (numbers.next() % 8)
                add(data + at, wanted < rest ? wanted : rest);
            at += wanted < rest ? wanted : rest;
        }
    }
    tm_sums asked() { return {pieces.size(), pieces.data(), bytes.data(), crcs.data()}; }
    void sum() { CHECK_EQUAL(tm_crc32c(nullptr, pieces.size(), pieces.data(), bytes.data(), crcs.data()), 0); }
};

// The parts of several steps in one memory, each behind some bytes that no step has.
struct Tile {
    std::vector<char> memory;
    std::vector<tm_step> steps;
    char *end = nullptr;

    Tile(const std::vector<Kind> &kinds, const std::vector<uint64_t> &numels, uint64_t first_element)
        : memory(4096 * kinds.size() + 20 * std::accumulate(numels.begin(), numels.end(), 0ull)) {
        end = memory.data();
        for (uint64_t i = 0; i < kinds.size(); ++i)
            add(kinds[i], numels[i], first_element, i);
        CHECK(end <= memory.data() + memory.size());
    }
    Tile(const Tile &other) : memory(other.memory), steps(other.steps) {
        end = moved(other, other.end);
        for (tm_step &step : steps) {
            for (tm_part *part : parts_of(&step)) {
                part->data = moved(other, part->data);
                part->scales = (uint8_t *)moved(other, part->scales);
            }
        }
    }

    static std::vector<tm_part *> parts_of(tm_step *step) {
        return {&step->weight, &step->master, &step->grad, &step->moments[0], &step->moments[1], &step->moments[2]};
    }
    char *moved(const Tile &other, const void *address) {
        return address ? memory.data() + ((const char *)address - other.memory.data()) : nullptr;
    }
    tm_part room(int dtype, uint64_t n) {
        if (dtype == TM_NONE)
            return {};
        tm_part part = {end + 128, nullptr, dtype, 0};
        end += 128 + (n * tm_dtype_bytes(dtype) + 63) / 64 * 64;
        if (tm_dtype_is_q8(dtype)) {
            part.scales = (uint8_t *)end + 3;
            end += (n / 64 + 1 + 3 + 63) / 64 * 64;
        }
        return part;
    }
    void add(const Kind &kind, uint64_t n, uint64_t first_element, uint64_t number) {
        tm_step step = {};
        step.n = n;
        step.rule = kind.rule;
        step.rounding = kind.rounding;
        step.key = 5 + number;
        step.first_element = first_element;
        step.numbers = &NUMBERS;
        step.weight = room(kind.weight, n);
        step.master = room(kind.master, n);
        step.grad = room(kind.grad, n);
        for (int i = 0; i < 3; ++i)
            step.moments[i] = room(kind.moments[i], n);
        Numbers numbers{9 + number};
        std::vector<float> values(n);
        for (tm_part *part : parts_of(&step)) {
            for (float &value : values)
                value =
                    part == &step.weight || part == &step.grad ? numbers.uniform() : 0.5f + 0.4f * numbers.uniform();
            if (part->dtype != TM_NONE)
                CHECK_EQUAL(tm_part_narrow(nullptr, n, values.data(), part, step.weight.data), 0);
        }
        steps.push_back(step);
    }
};

struct World {
    tm_workers *workers;

    explicit World(uint32_t num_threads) { CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0); }
    ~World() { CHECK_EQUAL(tm_workers_close(workers), 0); }

    int pass(Tile *tile, Sums *before, Sums *after) {
        const tm_sums first = before->asked(), then = after->asked();
        return tm_pass_run(workers, tile->steps.size(), tile->steps.data(), &first, &then);
    }
    void in_turn(Tile *tile, Sums *before, Sums *after) {
        before->sum();
        for (const tm_step &step : tile->steps)
            CHECK_EQUAL(tm_optimizer_step(nullptr, &step), 0);
        after->sum();
    }
};

static Sums moved(const Sums &sums, const Tile &from, Tile *to) {
    Sums own = sums;
    for (const void *&piece : own.pieces)
        piece = to->moved(from, piece);
    return own;
}

static void a_pass_equals_three(uint32_t num_threads, const std::vector<Kind> &kinds,
                                const std::vector<uint64_t> &numels, uint64_t most, uint64_t first_element = 0) {
    World world(num_threads);
    Tile tile(kinds, numels, first_element), twin(tile);
    const uint64_t length = (uint64_t)(tile.end - tile.memory.data());
    Sums before, after;
    before.cut(tile.memory.data(), length, 1 + most, most);
    after.cut(tile.memory.data(), length, 2 + most, most);
    Sums twins_before = moved(before, tile, &twin), twins_after = moved(after, tile, &twin);
    for (int round = 0; round < 2; ++round) {
        CHECK_EQUAL(world.pass(&tile, &before, &after), 0);
        world.in_turn(&twin, &twins_before, &twins_after);
        CHECK(tile.memory == twin.memory);
        CHECK(before.crcs == twins_before.crcs);
        CHECK(after.crcs == twins_after.crcs);
    }
    Sums none;
    CHECK_EQUAL(world.pass(&tile, &none, &none), 0);
    world.in_turn(&twin, &none, &none);
    CHECK(tile.memory == twin.memory);
}

#ifdef __SANITIZE_THREAD__ // which slows each piece 20 times
static const std::vector<uint64_t> MOST_BYTES = {5000, 3 << 20};
#else
static const std::vector<uint64_t> MOST_BYTES = {70, 5000, 200000, 3 << 20};
#endif

static void all_kinds_equal(uint32_t num_threads) {
    const uint64_t n = 65536 + 2 * CHUNK + 64 * 7 + 13;
    for (uint64_t most : MOST_BYTES) {
        for (const Kind &kind : {EXACT, COMPACT, TINY, LARGEST, LION, SGD})
            a_pass_equals_three(num_threads, {kind}, {n}, most);
        a_pass_equals_three(num_threads, {EXACT, TINY, SGD, COMPACT, LION, EXACT, TINY},
                            {n, 63, 1, CHUNK, CHUNK - 1, 0, CHUNK + 65}, most);
        a_pass_equals_three(num_threads, {COMPACT, TINY}, {n, n}, most, (1ull << 32) - CHUNK - 70); // words wrap
    }
}

static void any_flipped_bit_is_seen() {
    World world(3);
    const uint64_t n = 65536 + 2 * CHUNK + 77;
    const Tile first({EXACT, TINY}, {n, n}, 0);
    const char *data = first.memory.data();
    Sums cut;
    cut.cut(data, (uint64_t)(first.end - data), 4, 40000);
    for (tm_step step : first.steps)
        for (const tm_part *part : Tile::parts_of(&step))
            for (uint64_t element : std::vector<uint64_t>{0, 65535, 65536 + CHUNK, n - 1}) {
                if (part->dtype == TM_NONE)
                    continue;
                const char *at = (const char *)part->data + element * tm_dtype_bytes(part->dtype);
                for (const char *place : {at, part->scales ? (const char *)part->scales + element / 64 : at}) {
                    Tile tile(first), damaged(first);
                    Sums before = moved(cut, first, &tile), wrong = moved(cut, first, &damaged), none;
                    *damaged.moved(first, place) ^= 4;
                    CHECK_EQUAL(world.pass(&tile, &before, &none), 0);
                    CHECK_EQUAL(world.pass(&damaged, &wrong, &none), 0);
                    for (size_t i = 0; i < cut.pieces.size(); ++i) {
                        const char *begin = (const char *)cut.pieces[i];
                        const bool is_inside = place >= begin && place < begin + cut.bytes[i];
                        CHECK_EQUAL(before.crcs[i] != wrong.crcs[i], is_inside);
                    }
                }
            }
}

// The second one goes on from what the first has made.
static void steps_that_share_memory_follow_one_another() {
    World world(3);
    Tile tile({EXACT, COMPACT}, {100000, 50000}, 0);
    tile.steps.push_back(tile.steps[0]);
    tile.steps.back().n = 90000;
    Tile twin(tile);
    Sums before, after;
    before.cut(tile.memory.data(), (uint64_t)(tile.end - tile.memory.data()), 5, 100000);
    after = before;
    Sums twins_before = moved(before, tile, &twin), twins_after = moved(after, tile, &twin);
    CHECK_EQUAL(world.pass(&tile, &before, &after), 0);
    world.in_turn(&twin, &twins_before, &twins_after);
    CHECK(tile.memory == twin.memory);
    CHECK(before.crcs == twins_before.crcs);
    CHECK(after.crcs == twins_after.crcs);
}

// The states that are read are those of another tile.
static void steps_beside_what_they_replace(const Kind &kind) {
    World world(2);
    const uint64_t n = 65536 + CHUNK + 77;
    Tile source({kind}, {n}, 0), tile(source);
    std::fill(tile.memory.begin(), tile.memory.end(), 0);
    memcpy(tile.steps[0].grad.data, source.steps[0].grad.data, n * tm_dtype_bytes(kind.grad));
    const std::vector<tm_part *> parts = Tile::parts_of(&source.steps[0]);
    for (int i = 0; i < 5; ++i) {
        tile.steps[0].sources[i] = parts[(size_t)(i + (i > 1))]->data; // not the gradient
        tile.steps[0].source_scales[i] = parts[(size_t)(i + (i > 1))]->scales;
    }
    Tile twin(tile);
    Sums before, after;
    before.cut(source.memory.data(), (uint64_t)(source.end - source.memory.data()), 6, 100000);
    after.cut(tile.memory.data(), (uint64_t)(tile.end - tile.memory.data()), 7, 100000);
    Sums twins_before = before, twins_after = moved(after, tile, &twin);
    CHECK_EQUAL(world.pass(&tile, &before, &after), 0);
    world.in_turn(&twin, &twins_before, &twins_after);
    CHECK(tile.memory == twin.memory);
    CHECK(before.crcs == twins_before.crcs);
    CHECK(after.crcs == twins_after.crcs);
}

static void a_step_that_is_refused_leaves_the_others() {
    World world(2);
    Tile tile({EXACT, EXACT}, {1000, 1000}, 0);
    tile.steps[1].rule = 77;
    const Tile twin(tile);
    Sums none;
    CHECK_EQUAL(world.pass(&tile, &none, &none), -EINVAL);
    CHECK(tile.memory == twin.memory);
}

int main() {
    for (uint32_t num_threads : {1u, 2u, 5u})
        RUN(all_kinds_equal, num_threads);
    RUN(any_flipped_bit_is_seen);
    RUN(steps_that_share_memory_follow_one_another);
    RUN(steps_beside_what_they_replace, EXACT);
    RUN(steps_beside_what_they_replace, TINY);
    RUN(a_step_that_is_refused_leaves_the_others);
    return 0;
}
