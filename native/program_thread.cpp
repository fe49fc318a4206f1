// program_thread: the one thread of a step program. Each turn it looks at transfers that ended, gives free room to the
// next strips, and works on one strip; with nothing to do it sleeps on the bell.

#include "program.h"

#include <algorithm>
#include <atomic>
#include <errno.h>
#include <string.h>

#include "engine.h"
#include "pass.h"

typedef std::unique_lock<std::mutex> Lock;

// Tags of programs, in every queue: the callers of tm_queue_submit count theirs from below.
static std::atomic<uint64_t> next_tag{1ull << 63};

static void fail(tm_program *p, const tm_failure &failure) {
    if (p->failure.error == 0)
        p->failure = failure;
    p->is_stopping |= p->phase == TM_PHASE_RUN; // the run of begun tiles says so
}

static tm_failure failure_of(const tm_program_tile *tile, int error, int during) {
    tm_failure failure = {};
    failure.error = error;
    failure.during = during;
    failure.tile = tile->index;
    return failure;
}

static int64_t *times_of(tm_program_tile *tile, tm_span span) {
    if (span == TM_SPAN_BEGUN)
        return tile->times.begun_ns;
    return span == TM_SPAN_READ ? tile->times.read_ns : tile->times.write_ns;
}

// Adds work or waiting to a span of a tile: its end is that of the last, its length that of all.
static void add_to(int64_t *span, int64_t begin_ns, int64_t end_ns) {
    const int64_t length_ns = span[1] - span[0] + end_ns - begin_ns;
    span[0] = end_ns - length_ns;
    span[1] = end_ns;
}

// ---- transfers ------------------------------------------------------------------------------------------------------

// Gives the transfers to their queues, one tag for each queue.
static void submit(tm_program *p, tm_strip *strip, const std::vector<tm_transfer> &transfers, int kind, int priority,
                   tm_span span) {
    for (size_t first = 0; first < transfers.size(); ++first) {
        tm_queue *queue = transfers[first].queue;
        bool is_given = false;
        for (size_t i = 0; i < first; ++i)
            is_given = is_given || transfers[i].queue == queue;
        if (is_given)
            continue;
        const uint64_t tag = next_tag++;
        strip->ops.clear();
        for (size_t i = first; i < transfers.size(); ++i)
            if (transfers[i].queue == queue)
                strip->ops.push_back({transfers[i].buffer, transfers[i].length, transfers[i].offset, tag,
                                      transfers[i].fd, kind, priority, 0});
        const tm_op &op = strip->ops[0];
        const uint64_t most_bytes = p->pace.most_flying() / p->queues.size();
        const int code =
            tm_queue_submit_ringing(queue, strip->ops.data(), (uint32_t)strip->ops.size(), &p->bell, most_bytes);
        if (code < 0) {
            tm_failure failure = failure_of(strip->tile, -code, kind == TM_READ ? TM_DURING_READ : TM_DURING_WRITE);
            failure.fd = op.fd;
            failure.kind = kind;
            failure.offset = op.offset;
            failure.length = op.length;
            fail(p, failure);
            strip->has_failed = strip->tile->has_failed = true;
            return;
        }
        strip->flights.push_back({queue, tag, span});
    }
}

static void note_answer(tm_program *p, tm_strip *strip, tm_span span, const tm_answer &answer) {
    tm_program_tile *tile = strip->tile;
    const bool is_write = span == TM_SPAN_WRITE;
    int64_t *times = times_of(tile, span);
    (is_write ? tile->times.written_bytes : tile->times.read_bytes) += answer.bytes;
    if (answer.started_ns && (times[0] == 0 || answer.started_ns < times[0]))
        times[0] = answer.started_ns;
    if (answer.started_ns && answer.finished_ns > times[1])
        times[1] = answer.finished_ns;
    if (answer.error == 0)
        return;
    tm_failure failure = failure_of(tile, answer.error, is_write ? TM_DURING_WRITE : TM_DURING_READ);
    failure.fd = answer.fd;
    failure.kind = answer.kind;
    failure.offset = answer.offset;
    failure.length = answer.length;
    if (answer.error != ECANCELED)
        fail(p, failure);
    strip->has_failed = tile->has_failed = true;
}

static void end_strip(tm_program *p, tm_strip *strip) {
    tm_program_tile *tile = strip->tile;
    tm_strip_leave(p, strip);
    strip->state = TM_ENDED;
    tile->num_ended += !strip->has_failed;
    if (!tile->is_ended())
        return;
    tile->times.is_ended = 1;
    if (tm_unit_left *left = tm_program_find_unit(p, tile->unit))
        --left->num_open;
    p->changed.notify_all();
}

namespace {

struct Moved {
    uint64_t bytes = 0;
    bool has_new_states = false; // of a strip whose states begin
};

} // namespace

static bool has_new_states(const tm_strip *strip) {
    const auto begins = [](const tm_step &step) { return (step.flags & TM_STEP_START) != 0; };
    return std::any_of(strip->steps.begin(), strip->steps.end(), begins);
}

// Takes the answers that are there, and notes what they have moved. True: a strip went on.
static bool look(tm_program *p, Moved *moved) {
    bool has_news = false;
    tm_answer answer;
    for (tm_strip *strip : p->active) {
        if (strip->flights.empty())
            continue;
        for (size_t i = strip->flights.size(); i-- > 0;) {
            const tm_flight flight = strip->flights[i];
            const int code = tm_queue_wait(flight.queue, flight.tag, 0, &answer);
            if (code == -ETIMEDOUT)
                continue;
            if (code == 0) {
                note_answer(p, strip, flight.span, answer);
                moved->bytes += answer.bytes;
                moved->has_new_states |= has_new_states(strip);
            } else {
                fail(p, failure_of(strip->tile, -code, TM_DURING_READ)); // never seen: the queue has forgotten it
            }
            strip->flights.erase(strip->flights.begin() + (ptrdiff_t)i);
        }
        if (!strip->flights.empty())
            continue;
        has_news = true;
        if (strip->state == TM_READING)
            strip->state = TM_ARRIVED;
        else if (strip->state == TM_WRITING)
            end_strip(p, strip);
    }
    if (has_news)
        p->changed.notify_all(); // tm_program_quiet
    return has_news;
}

static void forget_ended(tm_program *p) {
    size_t num = 0;
    for (tm_strip *strip : p->active)
        if (strip->state != TM_ENDED)
            p->active[num++] = strip;
        else
            p->idle.push_back(strip);
    p->active.resize(num);
}

// ---- reading ahead --------------------------------------------------------------------------------------------------

static bool is_any(const tm_program *p, tm_strip_state low, tm_strip_state high) {
    for (const tm_strip *strip : p->active)
        if (strip->state >= low && strip->state <= high)
            return true;
    return false;
}

// Copies what memory has of the strip's reads to its room; the rest is to be read from files.
static void copy_cached(tm_strip *strip) {
    const auto is_cached = [](const tm_transfer &read) { return read.cached != nullptr; };
    const auto is_copied = [&](const tm_piece &piece) {
        return std::any_of(strip->reads.begin(), strip->reads.end(), [&](const tm_transfer &read) {
            return read.cached && piece.data >= read.buffer && (char *)piece.data < (char *)read.buffer + read.length;
        });
    };
    for (const tm_transfer &read : strip->reads)
        if (read.cached)
            memcpy(read.buffer, read.cached, read.length);
    size_t num = 0;
    for (size_t i = 0; i < strip->checks.size(); ++i)
        if (!is_copied(strip->checks[i])) {
            strip->check_numbers[num] = strip->check_numbers[i];
            strip->checks[num++] = strip->checks[i];
        }
    strip->checks.resize(num);
    strip->check_numbers.resize(num);
    strip->reads.erase(std::remove_if(strip->reads.begin(), strip->reads.end(), is_cached), strip->reads.end());
}

static void start_reads(tm_program *p, tm_strip *strip) {
    strip->is_due = false;
    if (!strip->reads.empty())
        strip->state = TM_READING;
    copy_cached(strip);
    const int priority = strip->tile->is_urgent ? (int)TM_URGENT : p->priority;
    submit(p, strip, strip->reads, TM_READ, priority, p->phase == TM_PHASE_BEGUN ? TM_SPAN_BEGUN : TM_SPAN_READ);
    if (strip->flights.empty() && strip->state == TM_READING)
        strip->state = TM_ARRIVED;
}

// The tile whose strip is made next; NULL: there is none.
static tm_program_tile *next_tile(tm_program *p) {
    if (p->cut)
        return p->cut;
    return p->num_admitted < p->order.size() ? &p->tiles[p->order[p->num_admitted]] : nullptr;
}

static void note_pace(tm_program *p, const Moved &moved) {
    const bool is_piped = !(p->flags & (TM_RUN_ONE_READ | TM_RUN_ONE_WRITE));
    const bool is_full = p->phase == TM_PHASE_RUN && !p->is_stopping && is_piped && next_tile(p);
    if (!is_full || moved.has_new_states)
        p->pace.pause();
    else if (moved.bytes > 0)
        p->pace.moved(moved.bytes, tm_now_ns());
}

bool tm_program_admit(tm_program *p) {
    bool has_one = false;
    for (tm_strip *strip : p->active) // begun ones, whose run has come
        if (strip->is_due && !p->is_stopping) {
            has_one = true;
            for (const tm_flight &flight : strip->flights)
                tm_queue_promote(flight.queue, flight.tag, p->priority);
            start_reads(p, strip);
        }
    while (tm_program_tile *tile = p->is_stopping ? nullptr : next_tile(p)) {
        if ((p->flags & TM_RUN_ONE_READ) && is_any(p, TM_READING, TM_COMPUTED))
            break;
        int error;
        tm_strip *strip = tm_strip_make(p, tile, &error);
        if (error < 0)
            fail(p, failure_of(tile, -error, TM_DURING_READ));
        if (!strip)
            break;
        p->num_admitted += !p->cut;
        p->cut = tile->num_made < tile->num_strips ? tile : nullptr;
        start_reads(p, strip);
        has_one = true;
    }
    return has_one;
}

// ---- the work on a strip --------------------------------------------------------------------------------------------

// The pieces; their checksums go to strip->crcs[first] and on.
static tm_sums sums_of(tm_strip *strip, const std::vector<tm_piece> &pieces, size_t first) {
    for (size_t i = 0; i < pieces.size(); ++i) {
        strip->addresses[first + i] = pieces[i].data;
        strip->bytes[first + i] = pieces[i].bytes;
    }
    return {pieces.size(), strip->addresses.data() + first, strip->bytes.data() + first, strip->crcs.data() + first};
}

// Compares the checksums of what was read with those that it must have.
static tm_failure compare(const tm_strip *strip) {
    tm_failure failure = {};
    for (size_t i = 0; i < strip->checks.size(); ++i) {
        if (strip->crcs[i] == *strip->checks[i].crc)
            continue;
        if (failure.num_wrong == 0) {
            failure = failure_of(strip->tile, EBADMSG, TM_DURING_CHECK);
            failure.piece = strip->check_numbers[i];
            failure.seen = strip->crcs[i];
        }
        ++failure.num_wrong;
    }
    return failure;
}

// Checks what was read, apart from its step. The strip is the thread's own; the lock is not held.
static tm_failure check(tm_program *p, tm_strip *strip) {
    if (strip->checks.empty())
        return {};
    const int64_t begin_ns = tm_now_ns();
    const tm_sums sums = sums_of(strip, strip->checks, 0);
    const int code = tm_crc32c(p->workers, sums.n, sums.pieces, sums.bytes, sums.crcs);
    if (code < 0)
        return failure_of(strip->tile, -code, TM_DURING_CHECK);
    const tm_failure failure = compare(strip);
    add_to(strip->tile->times.check_ns, begin_ns, tm_now_ns());
    strip->checks.clear();
    return failure;
}

static void keep_sums(tm_strip *strip, const uint32_t *crcs) {
    for (size_t i = 0; i < strip->sums.size(); ++i) {
        *strip->sums[i].crc = crcs[i];
        if (strip->sums[i].is_known)
            *strip->sums[i].is_known = 1;
    }
    strip->sums.clear();
}

// Whether the steps change nothing but the strip's room, which is of no use when a checksum is wrong.
static bool is_all_in_room(const tm_strip *strip) {
    const char *begin = strip->room.data, *end = begin + strip->room.bytes;
    for (const tm_step &step : strip->steps)
        for (const tm_part *part : {&step.weight, &step.master, &step.moments[0], &step.moments[1], &step.moments[2]})
            if (part->dtype != TM_NONE && ((char *)part->data < begin || (char *)part->data >= end))
                return false;
    return true;
}

// Checks, steps and sums, all in one pass if it may.
static tm_failure step(tm_program *p, tm_strip *strip) {
    if (!is_all_in_room(strip)) {
        const tm_failure failure = check(p, strip);
        if (failure.error != 0)
            return failure;
    }
    const int64_t begin_ns = tm_now_ns();
    const tm_sums before = sums_of(strip, strip->checks, 0), after = sums_of(strip, strip->sums, before.n);
    const int code = tm_pass_run(p->workers, strip->steps.size(), strip->steps.data(), &before, &after);
    const tm_failure failure = code < 0 ? failure_of(strip->tile, -code, TM_DURING_STEP) : compare(strip);
    if (failure.error != 0)
        return failure;
    keep_sums(strip, after.crcs);
    add_to(strip->tile->times.step_ns, begin_ns, tm_now_ns());
    return {};
}

static void note_stepped(tm_program *p, tm_strip *strip) {
    tm_program_tile *tile = strip->tile;
    strip->is_stepped = true;
    if (tile->wanted_at)
        memcpy(tile->wanted_at + strip->weights_first, strip->weights, strip->weight_bytes);
    if (++tile->num_stepped < tile->num_strips)
        return;
    tile->wanted_at = nullptr;
    if (tm_unit_left *left = tm_program_find_unit(p, tile->unit))
        --left->num_unstepped;
    p->changed.notify_all();
}

// Sums what a caller has made, apart from its step.
static tm_failure sum(tm_program *p, tm_strip *strip) {
    if (strip->sums.empty())
        return {};
    const int64_t begin_ns = tm_now_ns();
    const tm_sums sums = sums_of(strip, strip->sums, 0);
    const int code = tm_crc32c(p->workers, sums.n, sums.pieces, sums.bytes, sums.crcs);
    if (code < 0)
        return failure_of(strip->tile, -code, TM_DURING_WRITE);
    keep_sums(strip, sums.crcs);
    add_to(strip->tile->times.sum_ns, begin_ns, tm_now_ns());
    return {};
}

static void drop(tm_program *p, tm_strip *strip) {
    strip->has_failed = strip->tile->has_failed = true;
    end_strip(p, strip);
}

// From stepped to written.
static void send(tm_program *p, tm_strip *strip, Lock *lock) {
    note_stepped(p, strip);
    strip->state = TM_WORKED;
    lock->unlock();
    const tm_failure failure = sum(p, strip);
    lock->lock();
    if (failure.error != 0) {
        fail(p, failure);
        drop(p, strip);
        return;
    }
    if (strip->writes.empty()) {
        end_strip(p, strip);
        return;
    }
    tm_program_tile *tile = strip->tile;
    strip->state = TM_WRITING;
    tile->times.is_writing = 1;
    submit(p, strip, strip->writes, TM_WRITE, tile->is_urgent ? TM_NORMAL : TM_BACKGROUND, TM_SPAN_WRITE);
    if (strip->flights.empty()) // refused
        drop(p, strip);
}

static void work_on(tm_program *p, tm_strip *strip, Lock *lock) {
    if (p->is_stopping || strip->has_failed) {
        drop(p, strip);
        return;
    }
    const bool is_brought = strip->state == TM_COMPUTED; // and has been checked before
    const bool is_called = !is_brought && (strip->tile->flags & (TM_TILE_CALLED | TM_TILE_BROUGHT));
    strip->state = TM_WORKED;
    lock->unlock();
    const tm_failure failure = is_called ? check(p, strip) : step(p, strip);
    lock->lock();
    if (failure.error != 0) {
        fail(p, failure);
        drop(p, strip);
    } else if (is_called) {
        strip->state = TM_OFFERED;
        p->called.notify_all();
    } else {
        send(p, strip, lock);
    }
}

static bool is_before(const tm_strip *strip, const tm_strip *other) {
    const tm_program_tile *tile = strip->tile, *of_other = other->tile;
    if (tile->is_urgent != of_other->is_urgent)
        return tile->is_urgent;
    return tile != of_other ? tile->index < of_other->index : strip->number < other->number;
}

// The next strip to work on: one that a caller has computed, else the first urgent one that has arrived, else the
// first.
static tm_strip *choose(tm_program *p) {
    tm_strip *best = nullptr;
    for (tm_strip *strip : p->active) {
        if (strip->state == TM_COMPUTED)
            return strip;
        if (strip->state == TM_ARRIVED && !strip->is_due && (!best || is_before(strip, best)))
            best = strip;
    }
    if (best && !p->is_stopping && (p->flags & TM_RUN_ONE_WRITE) && is_any(p, TM_OFFERED, TM_WRITING))
        return nullptr;
    return best;
}

// ---- turns ----------------------------------------------------------------------------------------------------------

static void note_wait(tm_program *p, tm_program_tile *tile) {
    const int64_t arrived_ns =
        tile->times.read_ns[1] > tile->times.begun_ns[1] ? tile->times.read_ns[1] : tile->times.begun_ns[1];
    if (p->waiting_since_ns && arrived_ns > p->waiting_since_ns)
        add_to(tile->times.waited_ns, p->waiting_since_ns, arrived_ns);
    p->waiting_since_ns = 0;
}

// Ends what may end early: reads of a run that stops, strips that no caller has taken.
static void cut_short(tm_program *p) {
    for (tm_strip *strip : p->active)
        if (strip->state == TM_OFFERED || (strip->state == TM_ARRIVED && strip->flights.empty()))
            drop(p, strip);
        else if (strip->state == TM_READING)
            for (const tm_flight &flight : strip->flights)
                tm_queue_cancel(flight.queue, flight.tag);
}

// What the run waits for goes before prefetches, when its caller waits for nothing else.
static void hurry(tm_program *p) {
    if (!(p->flags & TM_RUN_AWAITED) || p->is_stopping)
        return;
    tm_strip *first = nullptr;
    for (tm_strip *strip : p->active) {
        const bool is_read = strip->state == TM_READING;
        if (!strip->flights.empty() && (!first || (is_read && first->state != TM_READING)))
            first = strip;
    }
    if (first)
        tm_program_promote(first);
}

static bool end_if_over(tm_program *p) {
    const bool is_given = p->num_admitted == p->num_total && !p->cut;
    const bool is_over = p->active.empty() && (p->is_stopping || is_given);
    if (p->phase == TM_PHASE_IDLE || !is_over)
        return false;
    if (p->phase == TM_PHASE_BEGUN && !p->is_stopping)
        return false; // begun tiles were none
    p->phase = TM_PHASE_IDLE;
    p->changed.notify_all();
    p->called.notify_all();
    return true;
}

// True: there may be more to do at once.
static bool turn(tm_program *p, Lock *lock) {
    if (p->phase == TM_PHASE_IDLE)
        return false;
    Moved moved;
    bool has_news = look(p, &moved);
    note_pace(p, moved);
    if (p->is_stopping)
        cut_short(p);
    forget_ended(p);
    has_news = tm_program_admit(p) || has_news;
    if (tm_strip *strip = p->phase == TM_PHASE_RUN ? choose(p) : nullptr) {
        note_wait(p, strip->tile);
        if (strip->state == TM_COMPUTED && strip->has_failed)
            drop(p, strip);
        else if (strip->state == TM_COMPUTED && (strip->tile->flags & TM_TILE_CALLED))
            send(p, strip, lock);
        else
            work_on(p, strip, lock);
        has_news = true;
    }
    forget_ended(p);
    return !end_if_over(p) && has_news;
}

void tm_program_serve(tm_program *p) {
    tm_thread_wakes_soon();
    Lock lock(p->mutex);
    for (;;) {
        const uint64_t seen = p->bell.count();
        while (turn(p, &lock))
            continue;
        if (p->is_closing && p->phase == TM_PHASE_IDLE)
            return;
        if (p->phase != TM_PHASE_IDLE) {
            hurry(p);
            if (p->waiting_since_ns == 0)
                p->waiting_since_ns = tm_now_ns();
        }
        lock.unlock();
        p->bell.wait_beyond(seen);
        lock.lock();
    }
}
