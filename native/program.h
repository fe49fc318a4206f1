// program: what the files of the step program share.
//
//     program.cpp          what callers ask: begin, run, next, done, wait, take, forget, stop, report
//     program_thread.cpp   the thread: reads ahead, checks, steps, sums and writes
//     program_strips.cpp   strips of tiles, and the room that each has in a buffer
//     pace.cpp             how many bytes of strips are under way, and how many are one
//
// A tile is what callers know. What is under way is a strip: all of a tile in a buffer of its own, or a range of its
// elements in a part of one.
//
// One mutex guards everything; the thread gives it up while a kernel or a checksum runs. A strip that the thread or a
// caller works on belongs to them until then. Order of locks: the program's, a queue's, the bell's. The thread sleeps
// on the bell, which queues ring when a transfer ends and callers when they ask for something; callers sleep on
// `changed`.
#ifndef TIERMEM_PROGRAM_H
#define TIERMEM_PROGRAM_H

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <sys/types.h>
#include <thread>
#include <vector>

#include "bell.h"
#include "pace.h"
#include "tiermem.h"

enum tm_strip_state {
    TM_READING,  // transfers into its room are under way
    TM_ARRIVED,  // can be checked and stepped
    TM_WORKED,   // the thread checks, steps or sums it
    TM_OFFERED,  // checked; a caller may take it
    TM_CALLED,   // a caller works on it
    TM_COMPUTED, // a caller has ended its work; what was brought is to be stepped
    TM_WRITING,  // transfers out of its room are under way
    TM_ENDED     // has no room any more
};

// A tile as it was given, and how far its strips are.
struct tm_program_tile {
    uint64_t key, weight_bytes = 0;
    uint32_t index = 0, unit, flags, turn;
    uint32_t num_strips = 1;
    uint32_t num_joined = 1; // strips as its columns said that are one strip now
    std::vector<tm_transfer> reads, writes;
    std::vector<tm_piece> checks, sums;
    std::vector<tm_step> steps;
    std::vector<tm_step_numbers> numbers; // of the steps
    std::vector<tm_column> columns;
    char *weights = nullptr;
    char *wanted_at = nullptr;                             // where tm_program_take wants a copy of the weights
    uint32_t num_made = 0, num_stepped = 0, num_ended = 0; // strips
    bool is_urgent = false;
    bool has_failed = false; // or was cut short: it is neither stepped nor written any more
    tm_tile_times times = {};

    bool is_stepped() const { return num_stepped == num_strips; }
    bool is_ended() const { return num_ended == num_strips; }
};

enum tm_span { TM_SPAN_BEGUN, TM_SPAN_READ, TM_SPAN_WRITE };

// Transfers of a strip in one queue, under one tag.
struct tm_flight {
    tm_queue *queue;
    uint64_t tag;
    tm_span span; // of the tile's times
};

// Memory of a strip.
struct tm_room {
    int buffer = -1; // -1: none
    char *data = nullptr;
    uint64_t bytes = 0;
};

// Part of a tile: what it has to do, in its own room.
struct tm_strip {
    tm_program_tile *tile = nullptr;
    uint32_t number = 0;
    tm_strip_state state = TM_ARRIVED;
    tm_room room;
    bool is_due = true; // its `reads` have not been submitted
    bool is_stepped = false;
    bool has_failed = false;
    std::vector<tm_transfer> reads, writes;
    std::vector<tm_piece> checks, sums;
    std::vector<uint64_t> check_numbers; // among those that were given, of which there are so many
    uint64_t num_given_checks = 0;
    std::vector<tm_step> steps;
    char *weights = nullptr;                      // in its room
    uint64_t weights_first = 0, weight_bytes = 0; // of the tile's weights
    std::vector<tm_flight> flights;
    // Memory for its work.
    std::vector<tm_op> ops;
    std::vector<const void *> addresses;
    std::vector<uint64_t> bytes;
    std::vector<uint32_t> crcs;
};

// Tiles of a unit that are not stepped, and that have not ended.
struct tm_unit_left {
    uint32_t unit;
    uint32_t num_unstepped, num_open;
};

enum tm_program_phase {
    TM_PHASE_IDLE,  // nothing is under way; the last run may be reported
    TM_PHASE_BEGUN, // tiles are read ahead of their run
    TM_PHASE_RUN
};

struct tm_program {
    explicit tm_program(uint64_t least_bytes) : pace(least_bytes) {}

    pid_t owner;
    tm_workers *workers = nullptr;
    std::thread thread;
    tm_bell bell;

    std::mutex mutex; // guards everything below
    tm_pace pace;     // of strips that are parts of a buffer
    std::condition_variable changed;
    std::condition_variable called; // a tile is offered, or the run has ended: not what becomes of each tile
    tm_program_phase phase = TM_PHASE_IDLE;
    bool is_stopping = false; // no tile is read or stepped any more
    bool is_closing = false;
    int32_t priority = TM_NORMAL;
    uint32_t flags = 0;
    tm_failure failure = {};
    std::deque<tm_program_tile> tiles; // stay where they are while others are added
    std::vector<tm_unit_left> units;
    std::vector<uint32_t> order; // the tiles in the order in which they get room; the first num_admitted have got it
    uint32_t num_admitted = 0;
    uint32_t num_total = 0;         // tiles that the run will have been given; `order` and `units` have room for them
    tm_program_tile *cut = nullptr; // the last one admitted, while some of its strips are not made
    std::vector<tm_strip *> active; // made, and not ended
    std::vector<tm_strip *> idle;
    std::vector<std::unique_ptr<tm_strip>> strips; // all of them
    std::vector<tm_queue *> queues;                // that the run's transfers go to
    std::vector<char *> buffers;
    uint64_t buffer_bytes = 0;
    std::vector<int> free_buffers;
    std::vector<tm_room> free_parts;  // of buffers that are cut; the last one given back is the last of them
    std::vector<uint32_t> used_parts; // of each buffer
    int64_t waiting_since_ns = 0;
};

// The thread's whole life.
void tm_program_serve(tm_program *p);

// The unit's counts; NULL: no tile of the run is its.
tm_unit_left *tm_program_find_unit(tm_program *p, uint32_t unit);

// Makes what the strip has in queues urgent.
void tm_program_promote(tm_strip *strip);

// Whether the tile's bytes pass through a buffer.
bool tm_program_needs_room(const tm_program_tile *tile);

// Sets the number of a tile's strips. buffer: the first one; NULL: there is none. -EINVAL: its columns do not hold all
// of it, or a piece lies in two strips.
int tm_tile_cut(tm_program_tile *tile, const char *buffer, uint64_t buffer_bytes);

// The next strip of a tile, in room of its own; it is active from now on. NULL, and *error: 0, there is no room; or a
// negative errno.
tm_strip *tm_strip_make(tm_program *p, tm_program_tile *tile, int *error);

// Room for all that a strip of the tile can have to do; may throw bad_alloc.
void tm_strip_reserve(tm_strip *strip, const tm_program_tile *tile);

// Adds what its tile was given to what the strip has to do, in the strip's own room: all of it, or what its range of
// elements has.
void tm_strip_fill(const tm_program *p, tm_strip *strip);

// Gives its room back.
void tm_strip_leave(tm_program *p, tm_strip *strip);

// Gives room to the next strips and starts their reads. True: one got what it needs.
bool tm_program_admit(tm_program *p);

int64_t tm_now_ns();

#endif
