// program: what the files of the step program share.
//
//     program.cpp          what callers ask: begin, run, next, done, wait, take, forget, stop, report
//     program_thread.cpp   the thread: reads ahead, checks, steps, sums and writes
//
// One mutex guards everything; the thread gives it up while a kernel or a checksum runs. A tile that the thread or a
// caller works on belongs to them until then. Order of locks: the program's, a queue's, the bell's. The thread sleeps
// on the bell, which queues ring when a transfer ends and callers when they ask for something; callers sleep on
// `changed`.
#ifndef TIERMEM_PROGRAM_H
#define TIERMEM_PROGRAM_H

#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <sys/types.h>
#include <thread>
#include <vector>

#include "bell.h"
#include "tiermem.h"

enum tm_tile_state {
    TM_WAITING,  // has no buffer yet, if it needs one
    TM_READING,  // transfers into its buffer are under way
    TM_ARRIVED,  // can be checked and stepped
    TM_WORKED,   // the thread checks, steps or sums it
    TM_OFFERED,  // checked; a caller may take it
    TM_CALLED,   // a caller works on it
    TM_COMPUTED, // a caller has ended its work; what was brought is to be stepped
    TM_WRITING,  // transfers out of its buffer are under way
    TM_ENDED     // has no buffer any more
};

// Transfers of a tile in one queue, under one tag.
struct tm_flight {
    tm_queue *queue;
    uint64_t tag;
    int64_t *times; // of the tile: begun_ns, read_ns or write_ns
};

struct tm_program_tile {
    uint64_t key, weight_bytes;
    uint32_t unit, flags, turn;
    std::vector<tm_transfer> reads, writes;
    std::vector<tm_piece> checks, sums;
    std::vector<tm_step> steps;
    std::vector<tm_flight> flights;
    char *weights;
    char *wanted_at = nullptr; // where tm_program_take wants a copy of the weights
    tm_tile_state state = TM_WAITING;
    int buffer = -1;
    bool is_due = true; // its `reads` have not been submitted
    bool is_stepped = false;
    bool is_urgent = false;
    bool has_failed = false; // or was cut short: it is neither stepped nor written any more
    tm_tile_times times = {};
    // Memory for its work, so that the thread never allocates.
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
    pid_t owner;
    tm_workers *workers = nullptr;
    std::thread thread;
    tm_bell bell;

    std::mutex mutex; // guards everything below
    std::condition_variable changed;
    tm_program_phase phase = TM_PHASE_IDLE;
    bool is_stopping = false; // no tile is read or stepped any more
    bool is_closing = false;
    int32_t priority = TM_NORMAL;
    uint32_t flags = 0;
    tm_failure failure = {};
    std::vector<tm_program_tile> tiles;
    std::vector<tm_unit_left> units;
    std::vector<uint32_t> order;  // the tiles in the order in which they get buffers; the first num_admitted have one
    std::vector<uint32_t> active; // tiles that are neither waiting nor ended
    uint32_t num_admitted = 0;
    uint32_t num_total = 0; // tiles that the run will have been given; everything has room for them
    std::vector<char *> buffers;
    uint64_t buffer_bytes = 0;
    std::vector<int> free_buffers;
    int64_t waiting_since_ns = 0;
};

// The thread's whole life.
void tm_program_serve(tm_program *p);

// Where an address that was given for the first buffer lies in the tile's own.
char *tm_program_place(const tm_program *p, const tm_program_tile *tile, const void *address);

// The unit's counts; NULL: no tile of the run is its.
tm_unit_left *tm_program_find_unit(tm_program *p, uint32_t unit);

// Makes what the tile has in queues urgent.
void tm_program_promote(tm_program_tile *tile);

// Gives buffers to the next tiles and starts their reads. True: one got what it needs.
bool tm_program_admit(tm_program *p);

int64_t tm_now_ns();

#endif
