// Does a program find how many bytes a disk wants under way, and in how large pieces?

#include "fixture.h"
#include "pace.h"

static const uint64_t LEAST = 8 << 20, BLOCK = 1 << 20;

// A disk whose bytes a second depend on what is under way, and vary by a tenth.
struct Disk {
    double few, some, many; // GB/s
    Numbers numbers{7};
    int64_t now_ns = 1;

    double rate(uint64_t limit) const { return limit == LEAST ? few : limit == 4 * LEAST ? some : many; }

    // Moves blocks, with a pause of a second after each of `run` blocks.
    void move(tm_pace *pace, uint64_t num_blocks, uint64_t run = 1 << 30) {
        for (uint64_t i = 1; i <= num_blocks; ++i) {
            now_ns += (int64_t)((double)BLOCK / rate(pace->limit()) * (0.95 + 0.1 * numbers.uniform()));
            pace->moved(BLOCK, now_ns);
            if (i % run == 0) {
                pace->pause();
                now_ns += 1000000000;
            }
        }
    }
};

// Blocks in which each limit has had its trials, and one is kept.
static const uint64_t TRIED = 24 * 32 * LEAST / BLOCK + 1;

static uint64_t found(double few, double some, double many, uint64_t run = 1 << 30) {
    Disk disk{few, some, many};
    tm_pace pace(LEAST);
    CHECK_EQUAL(pace.limit(), LEAST);
    disk.move(&pace, TRIED + TRIED / 16, run); // the first block after a pause tells nothing
    return pace.limit();
}

static void test_the_fastest_limit_is_kept() {
    CHECK_EQUAL(found(5.0, 4.6, 4.4), LEAST);
    CHECK_EQUAL(found(2.5, 2.9, 2.6), 4 * LEAST);
    CHECK_EQUAL(found(2.5, 2.5, 3.0), 8 * LEAST);
}

static void test_where_nothing_is_gained_few_bytes_are_under_way() {
    CHECK_EQUAL(found(3.0, 3.01, 3.02), LEAST);
    CHECK_EQUAL(found(3.0, 3.1, 3.12), LEAST);
    CHECK_EQUAL(found(3.0, 3.4, 3.5), 4 * LEAST);
}

static void test_settings_that_are_never_faster_are_tried_no_more() {
    Disk disk{5.0, 4.6, 4.4};
    tm_pace pace(LEAST);
    uint64_t num_higher = 0;
    for (uint64_t i = 0; i < TRIED; ++i) {
        disk.move(&pace, 1);
        num_higher += pace.limit() > LEAST;
    }
    CHECK_EQUAL(num_higher, 2 * TRIED / 8); // three trials of each of two, where all have 24
}

static void test_pauses_between_runs_are_not_time_of_the_disk() {
    CHECK_EQUAL(found(2.5, 2.5, 3.0, 100), 8 * LEAST);
    CHECK_EQUAL(found(5.0, 4.6, 4.4, 100), LEAST);
}

static void test_a_disk_that_changes_is_tried_again() {
    Disk disk{5.0, 4.6, 4.4};
    tm_pace pace(LEAST);
    disk.move(&pace, TRIED);
    CHECK_EQUAL(pace.limit(), LEAST);
    disk.few = 3.0;
    disk.move(&pace, TRIED + 64 * TRIED / 24);
    CHECK_EQUAL(pace.limit(), 4 * LEAST);
}

static void test_more_bytes_are_under_way_in_larger_pieces() {
    Disk disk{2.5, 2.5, 3.0};
    tm_pace pace(LEAST);
    CHECK_EQUAL(pace.strips_at_once(), 1u);
    disk.move(&pace, TRIED);
    CHECK_EQUAL(pace.strips_at_once(), 4u);
    CHECK(pace.fill_bytes() >= pace.limit()); // what the trial before has let in
}

int main() {
    test_the_fastest_limit_is_kept();
    test_where_nothing_is_gained_few_bytes_are_under_way();
    test_settings_that_are_never_faster_are_tried_no_more();
    test_pauses_between_runs_are_not_time_of_the_disk();
    test_a_disk_that_changes_is_tried_again();
    test_more_bytes_are_under_way_in_larger_pieces();
    return 0;
}
