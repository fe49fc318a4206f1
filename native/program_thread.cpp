// program_thread: the one thread of a step program. Each turn it looks at transfers that ended, gives free buffers to
// the next tiles, and works on one tile; with nothing to do it sleeps on the bell.

#include "program.h"

#include <algorithm>
#include <atomic>
#include <errno.h>
#include <string.h>

#include "pass.h"

typedef std::unique_lock<std::mutex> Lock;

// Tags of programs, in every queue: the callers of tm_queue_submit count theirs from below.
static std::atomic<uint64_t> next_tag{1ull << 63};

static void fail(tm_program *p, const tm_failure &failure) {
    if (p->failure.error == 0)
        p->failure = failure;
    p->is_stopping |= p->phase == TM_PHASE_RUN; // the run of begun tiles says so
}

static tm_failure failure_of(const tm_program *p, const tm_program_tile *tile, int error, int stage) {
    tm_failure failure = {};
    failure.error = error;
    failure.stage = stage;
    failure.tile = (uint64_t)(tile - p->tiles.data());
    return failure;
}

// ---- transfers ------------------------------------------------------------------------------------------------------

// Gives the transfers to their queues, one tag for each queue.
static void submit(tm_program *p, tm_program_tile *tile, const std::vector<tm_transfer> &transfers, int kind,
                   int priority, int64_t *times) {
    for (size_t first = 0; first < transfers.size(); ++first) {
        tm_queue *queue = transfers[first].queue;
        bool is_given = false;
        for (size_t i = 0; i < first; ++i)
            is_given = is_given || transfers[i].queue == queue;
        if (is_given)
            continue;
        const uint64_t tag = next_tag++;
        tile->ops.clear();
        for (size_t i = first; i < transfers.size(); ++i)
            if (transfers[i].queue == queue)
                tile->ops.push_back({tm_program_place(p, tile, transfers[i].buffer), transfers[i].length,
                                     transfers[i].offset, tag, transfers[i].fd, kind, priority, 0});
        const tm_op &op = tile->ops[0];
        const int code = tm_queue_submit_ringing(queue, tile->ops.data(), (uint32_t)tile->ops.size(), &p->bell);
        if (code < 0) {
            tm_failure failure = failure_of(p, tile, -code, kind == TM_READ ? TM_STAGE_READ : TM_STAGE_WRITE);
            failure.fd = op.fd;
            failure.kind = kind;
            failure.offset = op.offset;
            failure.length = op.length;
            fail(p, failure);
            tile->has_failed = true;
            return;
        }
        tile->flights.push_back({queue, tag, times});
    }
}

static void note_answer(tm_program *p, tm_program_tile *tile, const tm_flight &flight, const tm_answer &answer) {
    const bool is_write = flight.times == tile->times.write_ns;
    (is_write ? tile->times.written_bytes : tile->times.read_bytes) += answer.bytes;
    if (answer.started_ns && (flight.times[0] == 0 || answer.started_ns < flight.times[0]))
        flight.times[0] = answer.started_ns;
    if (answer.started_ns && answer.finished_ns > flight.times[1])
        flight.times[1] = answer.finished_ns;
    if (answer.error == 0)
        return;
    tm_failure failure = failure_of(p, tile, answer.error, is_write ? TM_STAGE_WRITE : TM_STAGE_READ);
    failure.fd = answer.fd;
    failure.kind = answer.kind;
    failure.offset = answer.offset;
    failure.length = answer.length;
    if (answer.error != ECANCELED)
        fail(p, failure);
    tile->has_failed = true;
}

static void end_tile(tm_program *p, tm_program_tile *tile) {
    if (tile->buffer >= 0)
        p->free_buffers.push_back(tile->buffer);
    tile->buffer = -1;
    tile->state = TM_ENDED;
    if (!tile->is_stepped || tile->has_failed)
        return;
    tile->times.is_ended = 1;
    if (tm_unit_left *left = tm_program_find_unit(p, tile->unit))
        --left->num_open;
    p->changed.notify_all();
}

// Takes the answers that are there. True: a tile went on.
static bool look(tm_program *p) {
    bool has_news = false;
    tm_answer answer;
    for (const uint32_t index : p->active) {
        tm_program_tile *tile = &p->tiles[index];
        if (tile->flights.empty())
            continue;
        for (size_t i = tile->flights.size(); i-- > 0;) {
            const int code = tm_queue_wait(tile->flights[i].queue, tile->flights[i].tag, 0, &answer);
            if (code == -ETIMEDOUT)
                continue;
            if (code == 0)
                note_answer(p, tile, tile->flights[i], answer);
            else
                fail(p, failure_of(p, tile, -code, TM_STAGE_READ)); // never seen: the queue has forgotten it
            tile->flights.erase(tile->flights.begin() + (ptrdiff_t)i);
        }
        if (!tile->flights.empty())
            continue;
        has_news = true;
        if (tile->state == TM_READING)
            tile->state = TM_ARRIVED;
        else if (tile->state == TM_WRITING)
            end_tile(p, tile);
    }
    if (has_news)
        p->changed.notify_all(); // tm_program_quiet
    return has_news;
}

static void forget_ended(tm_program *p) {
    size_t num = 0;
    for (const uint32_t index : p->active)
        if (p->tiles[index].state != TM_ENDED)
            p->active[num++] = index;
    p->active.resize(num);
}

// ---- reading ahead --------------------------------------------------------------------------------------------------

static bool takes_buffer(const tm_program_tile *tile) {
    return !tile->reads.empty() || !tile->writes.empty() || (tile->flags & TM_TILE_BROUGHT);
}

static bool is_any(const tm_program *p, tm_tile_state low, tm_tile_state high) {
    for (const uint32_t index : p->active)
        if (p->tiles[index].state >= low && p->tiles[index].state <= high)
            return true;
    return false;
}

// Copies what memory has of the tile's reads to its buffer; the rest is to be read from files.
static void copy_kept(tm_program *p, tm_program_tile *tile) {
    for (const tm_transfer &read : tile->reads) {
        if (!read.kept)
            continue;
        memcpy(tm_program_place(p, tile, read.buffer), read.kept, read.length);
        const char *begin = (const char *)read.buffer, *end = begin + read.length;
        const auto is_copied = [&](const tm_piece &piece) { return piece.data >= begin && piece.data < end; };
        tile->checks.erase(std::remove_if(tile->checks.begin(), tile->checks.end(), is_copied), tile->checks.end());
    }
    const auto is_kept = [](const tm_transfer &read) { return read.kept != nullptr; };
    tile->reads.erase(std::remove_if(tile->reads.begin(), tile->reads.end(), is_kept), tile->reads.end());
}

static void start_reads(tm_program *p, tm_program_tile *tile) {
    tile->is_due = false;
    if (tile->state == TM_WAITING || !tile->reads.empty())
        tile->state = TM_READING;
    copy_kept(p, tile);
    const int priority = tile->is_urgent ? (int)TM_URGENT : p->priority;
    submit(p, tile, tile->reads, TM_READ, priority,
           p->phase == TM_PHASE_BEGUN ? tile->times.begun_ns : tile->times.read_ns);
    if (tile->flights.empty() && tile->state == TM_READING)
        tile->state = TM_ARRIVED;
}

bool tm_program_admit(tm_program *p) {
    bool has_one = false;
    for (const uint32_t index : p->active) { // begun ones, whose run has come
        tm_program_tile *tile = &p->tiles[index];
        if (tile->is_due && !p->is_stopping) {
            has_one = true;
            for (const tm_flight &flight : tile->flights)
                tm_queue_promote(flight.queue, flight.tag, p->priority);
            start_reads(p, tile);
        }
    }
    while (!p->is_stopping && p->num_admitted < p->order.size()) {
        const uint32_t index = p->order[p->num_admitted];
        tm_program_tile *tile = &p->tiles[index];
        const bool needs_buffer = takes_buffer(tile);
        if (needs_buffer && p->free_buffers.empty())
            break;
        if ((p->flags & TM_RUN_ONE_READ) && is_any(p, TM_READING, TM_COMPUTED))
            break;
        if (needs_buffer) {
            tile->buffer = p->free_buffers.back();
            p->free_buffers.pop_back();
        }
        ++p->num_admitted;
        p->active.push_back(index);
        start_reads(p, tile);
        has_one = true;
    }
    return has_one;
}

// ---- the work on a tile ---------------------------------------------------------------------------------------------

// The pieces where they lie in the tile's buffer; their checksums go to tile->crcs[first] and on.
static tm_sums sums_of(tm_program *p, tm_program_tile *tile, const std::vector<tm_piece> &pieces, size_t first) {
    for (size_t i = 0; i < pieces.size(); ++i) {
        tile->addresses[first + i] = tm_program_place(p, tile, pieces[i].data);
        tile->bytes[first + i] = pieces[i].bytes;
    }
    return {pieces.size(), tile->addresses.data() + first, tile->bytes.data() + first, tile->crcs.data() + first};
}

// Compares the checksums of what was read with those that it must have.
static tm_failure compare(const tm_program *p, const tm_program_tile *tile) {
    tm_failure failure = {};
    for (size_t i = 0; i < tile->checks.size(); ++i) {
        if (tile->crcs[i] == *tile->checks[i].crc)
            continue;
        if (failure.num_wrong == 0) {
            failure = failure_of(p, tile, EBADMSG, TM_STAGE_CHECK);
            failure.piece = i;
            failure.seen = tile->crcs[i];
        }
        ++failure.num_wrong;
    }
    return failure;
}

// Checks what was read, apart from its step. The tile is the thread's own; the lock is not held.
static tm_failure check(tm_program *p, tm_program_tile *tile) {
    if (tile->checks.empty())
        return {};
    tile->times.check_ns[0] = tm_now_ns();
    const tm_sums sums = sums_of(p, tile, tile->checks, 0);
    const int code = tm_crc32c(p->workers, sums.n, sums.pieces, sums.bytes, sums.crcs);
    if (code < 0)
        return failure_of(p, tile, -code, TM_STAGE_CHECK);
    const tm_failure failure = compare(p, tile);
    tile->times.check_ns[1] = tm_now_ns();
    tile->checks.clear();
    return failure;
}

static void keep_sums(tm_program_tile *tile, const uint32_t *crcs) {
    for (size_t i = 0; i < tile->sums.size(); ++i) {
        *tile->sums[i].crc = crcs[i];
        if (tile->sums[i].is_known)
            *tile->sums[i].is_known = 1;
    }
    tile->sums.clear();
}

static void move(const tm_program *p, const tm_program_tile *tile, tm_part *part) {
    part->data = tm_program_place(p, tile, part->data);
    part->scales = (uint8_t *)tm_program_place(p, tile, part->scales);
}

static bool is_in_buffer(const tm_program *p, const tm_program_tile *tile, const tm_part &part) {
    const char *buffer = tile->buffer < 0 ? nullptr : p->buffers[(size_t)tile->buffer], *data = (char *)part.data;
    return part.dtype == TM_NONE || (buffer && data >= buffer && data < buffer + p->buffer_bytes);
}

// Whether the steps change nothing but the tile's buffer, which is of no use when a checksum is wrong.
static bool is_all_in_buffer(const tm_program *p, const tm_program_tile *tile) {
    for (const tm_step &step : tile->steps)
        for (const tm_part *part : {&step.weight, &step.master, &step.moments[0], &step.moments[1], &step.moments[2]})
            if (!is_in_buffer(p, tile, *part))
                return false;
    return true;
}

// Checks, steps and sums, all in one pass if it may.
static tm_failure step(tm_program *p, tm_program_tile *tile) {
    for (tm_step &own : tile->steps) {
        for (tm_part *part : {&own.weight, &own.master, &own.grad})
            move(p, tile, part);
        for (tm_part &moment : own.moments)
            move(p, tile, &moment);
    }
    if (!is_all_in_buffer(p, tile)) {
        const tm_failure failure = check(p, tile);
        if (failure.error != 0)
            return failure;
    }
    tile->times.step_ns[0] = tm_now_ns();
    const tm_sums before = sums_of(p, tile, tile->checks, 0), after = sums_of(p, tile, tile->sums, before.n);
    const int code = tm_pass_run(p->workers, tile->steps.size(), tile->steps.data(), &before, &after);
    const tm_failure failure = code < 0 ? failure_of(p, tile, -code, TM_STAGE_STEP) : compare(p, tile);
    if (failure.error != 0)
        return failure;
    keep_sums(tile, after.crcs);
    tile->times.step_ns[1] = tm_now_ns();
    return {};
}

static void note_stepped(tm_program *p, tm_program_tile *tile) {
    tile->is_stepped = true;
    if (tile->wanted_at)
        memcpy(tile->wanted_at, tm_program_place(p, tile, tile->weights), tile->weight_bytes);
    tile->wanted_at = nullptr;
    if (tm_unit_left *left = tm_program_find_unit(p, tile->unit))
        --left->num_unstepped;
    p->changed.notify_all();
}

// Sums what a caller has made, apart from its step.
static tm_failure sum(tm_program *p, tm_program_tile *tile) {
    if (tile->sums.empty())
        return {};
    tile->times.sum_ns[0] = tm_now_ns();
    const tm_sums sums = sums_of(p, tile, tile->sums, 0);
    const int code = tm_crc32c(p->workers, sums.n, sums.pieces, sums.bytes, sums.crcs);
    if (code < 0)
        return failure_of(p, tile, -code, TM_STAGE_WRITE);
    keep_sums(tile, sums.crcs);
    tile->times.sum_ns[1] = tm_now_ns();
    return {};
}

static void drop_tile(tm_program *p, tm_program_tile *tile) {
    tile->has_failed = true;
    end_tile(p, tile);
}

// From stepped to written.
static void send(tm_program *p, tm_program_tile *tile, Lock *lock) {
    note_stepped(p, tile);
    tile->state = TM_WORKED;
    lock->unlock();
    const tm_failure failure = sum(p, tile);
    lock->lock();
    if (failure.error != 0) {
        fail(p, failure);
        drop_tile(p, tile);
        return;
    }
    if (tile->writes.empty()) {
        end_tile(p, tile);
        return;
    }
    tile->state = TM_WRITING;
    tile->times.is_writing = 1;
    submit(p, tile, tile->writes, TM_WRITE, tile->is_urgent ? TM_NORMAL : TM_BACKGROUND, tile->times.write_ns);
    if (tile->flights.empty()) // refused
        drop_tile(p, tile);
}

static void work_on(tm_program *p, tm_program_tile *tile, Lock *lock) {
    if (p->is_stopping || tile->has_failed) {
        drop_tile(p, tile);
        return;
    }
    const bool is_brought = tile->state == TM_COMPUTED; // and has been checked before
    const bool is_called = !is_brought && (tile->flags & (TM_TILE_CALLED | TM_TILE_BROUGHT));
    tile->state = TM_WORKED;
    lock->unlock();
    const tm_failure failure = is_called ? check(p, tile) : step(p, tile);
    lock->lock();
    if (failure.error != 0) {
        fail(p, failure);
        drop_tile(p, tile);
    } else if (is_called) {
        tile->state = TM_OFFERED;
        p->changed.notify_all();
    } else {
        send(p, tile, lock);
    }
}

// The next tile to work on: one that a caller has computed, else the first urgent one that has arrived, else the first.
static tm_program_tile *choose(tm_program *p) {
    tm_program_tile *best = nullptr;
    for (const uint32_t index : p->active) {
        tm_program_tile *tile = &p->tiles[index];
        if (tile->state == TM_COMPUTED)
            return tile;
        if (tile->state != TM_ARRIVED || tile->is_due)
            continue;
        if (!best || (tile->is_urgent && !best->is_urgent) || (tile->is_urgent == best->is_urgent && tile < best))
            best = tile;
    }
    if (best && !p->is_stopping && (p->flags & TM_RUN_ONE_WRITE) && is_any(p, TM_OFFERED, TM_WRITING))
        return nullptr;
    return best;
}

// ---- turns ----------------------------------------------------------------------------------------------------------

static void note_wait(tm_program *p, tm_program_tile *tile) {
    const int64_t arrived_ns =
        tile->times.read_ns[1] > tile->times.begun_ns[1] ? tile->times.read_ns[1] : tile->times.begun_ns[1];
    if (p->waiting_since_ns && arrived_ns > p->waiting_since_ns) {
        tile->times.waited_ns[0] = p->waiting_since_ns;
        tile->times.waited_ns[1] = arrived_ns;
    }
    p->waiting_since_ns = 0;
}

// Ends what may end early: reads of a run that stops, tiles that no caller has taken.
static void cut_short(tm_program *p) {
    for (const uint32_t index : p->active) {
        tm_program_tile *tile = &p->tiles[index];
        if (tile->state == TM_OFFERED || (tile->state == TM_ARRIVED && tile->flights.empty()))
            drop_tile(p, tile);
        else if (tile->state == TM_READING)
            for (const tm_flight &flight : tile->flights)
                tm_queue_cancel(flight.queue, flight.tag);
    }
}

// What the run waits for goes before prefetches, when its caller waits for nothing else.
static void hurry(tm_program *p) {
    if (!(p->flags & TM_RUN_AWAITED) || p->is_stopping)
        return;
    tm_program_tile *first = nullptr;
    for (const uint32_t index : p->active) {
        tm_program_tile *tile = &p->tiles[index];
        const bool is_read = tile->state == TM_READING;
        if (!tile->flights.empty() && (!first || (is_read && first->state != TM_READING)))
            first = tile;
    }
    if (first)
        tm_program_promote(first);
}

static bool end_if_over(tm_program *p) {
    const bool is_over = p->active.empty() && (p->is_stopping || p->num_admitted == p->num_total);
    if (p->phase == TM_PHASE_IDLE || !is_over)
        return false;
    if (p->phase == TM_PHASE_BEGUN && !p->is_stopping)
        return false; // begun tiles were none
    p->phase = TM_PHASE_IDLE;
    p->changed.notify_all();
    return true;
}

// True: there may be more to do at once.
static bool turn(tm_program *p, Lock *lock) {
    if (p->phase == TM_PHASE_IDLE)
        return false;
    bool has_news = look(p);
    if (p->is_stopping)
        cut_short(p);
    forget_ended(p);
    has_news = tm_program_admit(p) || has_news;
    if (tm_program_tile *tile = p->phase == TM_PHASE_RUN ? choose(p) : nullptr) {
        note_wait(p, tile);
        if (tile->state == TM_COMPUTED && tile->has_failed)
            drop_tile(p, tile);
        else if (tile->state == TM_COMPUTED && (tile->flags & TM_TILE_CALLED))
            send(p, tile, lock);
        else
            work_on(p, tile, lock);
        has_news = true;
    }
    forget_ended(p);
    return !end_if_over(p) && has_news;
}

void tm_program_serve(tm_program *p) {
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
