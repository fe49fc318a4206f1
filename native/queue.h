// queue: what the files of the queue share: its parts, and how a tag ends.
//
//     queue_open.cpp     tries the engines, starts the thread
//     queue.cpp          what callers ask: submit, wait, promote, cancel, counters, close
//     queue_thread.cpp   the thread: cuts ops into blocks, pushes them, looks at what ended
//
//     submit -> op waits in the list of its priority -> cut into blocks, at most `depth` in slots
//            -> engine -> completion looked at -> remainder pushed again, or block ended
//            -> last block of a tag ended: the tag is answered -> wait copies the answer
//
// The thread alone calls the engine; everything else is guarded by one mutex. Any thread may submit: it appends
// and, when the thread sleeps and a block can be cut, wakes it. An op is cut when a slot becomes free, so
// a long queue costs one small object for each op, and promoting or cancelling costs what the tag's ops cost.
#ifndef TIERMEM_QUEUE_H
#define TIERMEM_QUEUE_H

#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <sys/types.h>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bell.h"
#include "engine.h"
#include "latency.h"
#include "tiermem.h"

struct tm_tag;

// What of one tm_op is not yet cut into blocks. In the list of its priority until nothing is left.
struct tm_waiting {
    char *buffer;
    uint64_t offset, length;
    int fd, kind, priority;
    tm_tag *tag;
    tm_waiting *previous, *next;
    tm_waiting *next_of_tag;
};

struct tm_tag {
    std::shared_ptr<tm_waiting[]> ops; // of the whole submission, which all its tags hold: one piece of memory
    tm_waiting *first = nullptr, *last = nullptr; // the tag's own among them
    uint32_t num_waiting = 0;                     // ops with something left to cut
    uint32_t num_flying = 0;                      // slots
    bool is_cancelled = false;
    bool is_answered = false;
    tm_bell *bell = nullptr; // rung when the tag is answered
    tm_answer answer = {};
};

// One block in flight. `request` is what was last pushed: the block, or what is left of it.
struct tm_slot {
    tm_request request;
    uint64_t offset, length; // the whole block
    int64_t cut_ns;
    tm_tag *tag;         // NULL: the slot is free
    unsigned num_stalls; // pushes in a row that transferred nothing
};

struct tm_list {
    tm_waiting *first = nullptr, *last = nullptr;
};

struct tm_queue {
    pid_t owner;
    uint64_t block_bytes = 0;
    bool is_single = false;                      // TM_QUEUE_SINGLE_SUBMIT
    bool is_in_waves = false;                    // TM_QUEUE_NO_OVERLAP
    const tm_engine_functions *engine = nullptr; // called by the thread alone, but for `wake` and totals
    tm_engine_state *engine_state = nullptr;
    std::thread thread;

    std::mutex mutex; // guards everything below
    std::condition_variable tag_answered;
    std::condition_variable waiter_left;
    std::unordered_map<uint64_t, tm_tag> tags;
    tm_list lists[TM_BACKGROUND + 1]; // by priority
    std::vector<tm_slot> slots;
    std::vector<uint32_t> free_slots;
    std::vector<uint32_t> again; // slots to push again, first of all
    tm_counters counters = {};
    tm_latencies latencies[TM_WRITE + 1]; // by kind
    uint64_t num_open_tags = 0;           // not answered
    uint64_t num_ringing = 0;             // of these, tags with a bell
    uint64_t flying_bytes = 0;            // of the slots that are taken
    uint64_t most_bytes = 0;              // in flight while tags with a bell are open
    int64_t wanted_since_ns = 0;          // while a tag is open
    int64_t busy_since_ns = 0;            // while a slot is taken
    uint32_t num_waiters = 0;
    int failure = 0;       // the engine itself broke: everything ends in this errno
    bool has_news = false; // somebody waits, and a tag was answered since waiters were told
    bool is_asleep = false;
    bool is_closing = false;

    // The thread's own; sized once.
    std::vector<uint32_t> batch; // slots to push now
    std::vector<tm_completion> completions;
    uint32_t num_ended = 0;      // completions not yet looked at
    uint32_t num_inside = 0;     // slots the engine has
    bool is_backing_off = false; // the kernel said EAGAIN: not again at once
};

int64_t tm_now_ns();

// The thread's whole life, after `engine` is open and until the queue is closed.
void tm_queue_serve(tm_queue *q);

inline bool tm_is_idle(const tm_queue *q) { return q->free_slots.size() == q->slots.size(); }

// Whether there is a slot for another block, and no program has all that it wants in flight.
inline bool tm_has_slot(const tm_queue *q) {
    return !q->free_slots.empty() && (q->num_ringing == 0 || q->flying_bytes < q->most_bytes || tm_is_idle(q));
}

// Whether a new block could go to the kernel now.
inline bool tm_may_cut(const tm_queue *q) { return q->is_in_waves ? tm_is_idle(q) : tm_has_slot(q); }

void tm_list_append(tm_queue *q, tm_waiting *op);
void tm_list_remove(tm_queue *q, tm_waiting *op);
tm_waiting *tm_list_first(const tm_queue *q); // of the most urgent list, or NULL

// Answers the tag when nothing of it waits or flies. Leaves `has_news` when somebody is to be told.
void tm_tag_answer_if_ended(tm_queue *q, tm_tag *tag, int64_t now);

// Takes the tag's ops out of the lists; true when there was one.
bool tm_tag_drop_waiting(tm_queue *q, tm_tag *tag);

// The first error of a tag is kept.
void tm_tag_note_error(tm_tag *tag, int error, int fd, int kind, uint64_t offset, uint64_t length);

#endif
