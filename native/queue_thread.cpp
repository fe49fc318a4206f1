// queue_thread: the one thread of a queue. It sleeps in the engine; each turn it looks at what ended, chooses what
// comes next, and hands that to the kernel.
//
// A short transfer keeps its slot and is pushed again for its remainder before anything new. On a file
// opened with O_DIRECT the remainder starts at the last 4096 boundary, since the middle of a sector
// cannot be asked for. EINTR and EAGAIN are pushed again whole. Without progress this ends after MAX_STALLS.

#include <chrono>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "queue.h"

static const unsigned MAX_STALLS = 1000;
static const std::chrono::microseconds PAUSE(200); // before a refused block is pushed again with nothing in flight

bool tm_engine_is_direct(int fd) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT);
}

// ---- what ended ---------------------------------------------------------------------------------

static void end_slot(tm_queue *q, uint32_t index, int error, int64_t now) {
    tm_slot *slot = &q->slots[index];
    tm_tag *tag = slot->tag;
    if (error != 0) {
        tm_tag_note_error(tag, error, slot->request.fd, slot->request.kind, slot->offset,
                          slot->request.kind == TM_SYNC ? 0 : slot->length);
        tm_tag_drop_waiting(q, tag);
        tag->answer.bytes += slot->request.offset - slot->offset;
    } else if (slot->request.kind != TM_SYNC) {
        tag->answer.bytes += slot->length;
        ++q->latencies[slot->request.kind].counts[tm_latency_bucket(now - slot->cut_ns)];
    }
    slot->tag = nullptr;
    q->flying_bytes -= slot->length;
    q->free_slots.push_back(index);
    if (tm_is_idle(q))
        q->counters.busy_ns += now - q->busy_since_ns;
    --tag->num_flying;
    tm_tag_answer_if_ended(q, tag, now);
}

static void push_again(tm_queue *q, uint32_t index, bool has_progress, int error_at_last, int64_t now) {
    tm_slot *slot = &q->slots[index];
    slot->num_stalls = has_progress ? 0 : slot->num_stalls + 1;
    if (slot->num_stalls > MAX_STALLS) {
        end_slot(q, index, error_at_last, now);
        return;
    }
    ++q->counters.resumed;
    q->again.push_back(index);
}

// A read that ended at the end of a regular file would end there for ever.
static bool is_at_end(const tm_request &request, uint64_t position) {
    struct stat file;
    return request.kind == TM_READ && fstat(request.fd, &file) == 0 && S_ISREG(file.st_mode) &&
           position >= (uint64_t)file.st_size;
}

static void resume_short(tm_queue *q, uint32_t index, uint64_t bytes, int64_t now) {
    tm_request *request = &q->slots[index].request;
    if (request->kind == TM_READ && bytes == 0) {
        end_slot(q, index, ENODATA, now);
        return;
    }
    uint64_t position = request->offset + bytes;
    if (tm_engine_is_direct(request->fd)) {
        if (is_at_end(*request, position)) {
            end_slot(q, index, ENODATA, now);
            return;
        }
        position -= position % TM_DIRECT_ALIGN;
        if (position < request->offset)
            position = request->offset;
    }
    const uint64_t step = position - request->offset;
    request->buffer += step;
    request->offset += step;
    request->length -= (uint32_t)step;
    push_again(q, index, step > 0, EIO, now);
}

static void settle(tm_queue *q, uint32_t index, int64_t result, int64_t now) {
    const tm_request &request = q->slots[index].request;
    if (result == -EINTR || result == -EAGAIN) {
        q->is_backing_off |= result == -EAGAIN;
        push_again(q, index, false, (int)-result, now);
        return;
    }
    if (result > 0 && request.kind != TM_SYNC)
        (request.kind == TM_READ ? q->counters.read_bytes : q->counters.written_bytes) += (uint64_t)result;
    if (result >= 0 && request.kind != TM_SYNC && (uint64_t)result < request.length) {
        resume_short(q, index, (uint64_t)result, now);
        return;
    }
    ++q->counters.blocks;
    end_slot(q, index, result < 0 ? (int)-result : 0, now);
}

// Looks at the completions of the last turn; takes back what the engine refused.
static void settle_all(tm_queue *q, int64_t now) {
    q->is_backing_off = !q->batch.empty();
    q->again.insert(q->again.end(), q->batch.begin(), q->batch.end());
    for (uint32_t i = 0; i < q->num_ended; ++i)
        settle(q, q->completions[i].slot, q->completions[i].result, now);
    q->num_ended = 0;
}

// ---- what comes next ----------------------------------------------------------------------------

static void cut_block(tm_queue *q, tm_waiting *op, int64_t now) {
    if (tm_is_idle(q))
        q->busy_since_ns = now;
    const uint32_t index = q->free_slots.back();
    q->free_slots.pop_back();
    tm_slot *slot = &q->slots[index];
    const uint64_t length = op->length < q->block_bytes ? op->length : q->block_bytes;
    slot->request = {op->buffer, op->offset, (uint32_t)length, index, op->fd, op->kind};
    slot->offset = op->offset;
    slot->length = length;
    slot->cut_ns = now;
    slot->tag = op->tag;
    slot->num_stalls = 0;
    q->flying_bytes += length;
    op->buffer += length;
    op->offset += length;
    op->length -= length;
    ++op->tag->num_flying;
    if (op->tag->answer.started_ns == 0)
        op->tag->answer.started_ns = now;
    if (op->length == 0) {
        tm_list_remove(q, op);
        --op->tag->num_waiting;
    }
    q->batch.push_back(index);
}

// Chooses what to push: remainders, then new blocks in the order of priority.
static void fill_batch(tm_queue *q, int64_t now) {
    q->batch.clear();
    for (const uint32_t index : q->again) {
        const tm_slot &slot = q->slots[index];
        if (slot.tag->answer.error != 0 || slot.tag->is_cancelled)
            end_slot(q, index, ECANCELED, now); // an earlier error stays
        else
            q->batch.push_back(index);
    }
    q->again.clear();
    tm_waiting *op = tm_list_first(q);
    if (!op || !tm_may_cut(q))
        return;
    const int64_t cut_ns = tm_now_ns(); // later than `now` by what the lock and the completions took
    for (; op && tm_has_slot(q); op = tm_list_first(q))
        cut_block(q, op, cut_ns);
}

// False when the queue is closing and nothing is left.
static bool choose(tm_queue *q, bool *has_news) {
    const int64_t now = tm_now_ns(); // one reading for all that ended, before the lock can delay it
    std::lock_guard<std::mutex> lock(q->mutex);
    settle_all(q, now);
    fill_batch(q, now);
    *has_news = q->has_news;
    q->has_news = false;
    q->is_asleep = true; // a submit from here on wakes us; waking somebody awake is harmless
    return !q->is_closing || !tm_is_idle(q);
}

// ---- a turn -------------------------------------------------------------------------------------

// Adds what the engine reports to `completions`. False: the engine itself broke.
static bool reap(tm_queue *q, tm_reap_mode mode) {
    const int reaped = q->engine->reap(q->engine_state, mode, q->completions.data() + q->num_ended,
                                       (uint32_t)q->completions.size() - q->num_ended);
    if (reaped < 0) {
        std::lock_guard<std::mutex> lock(q->mutex);
        q->failure = -reaped;
        return false;
    }
    q->num_inside -= (uint32_t)reaped;
    q->num_ended += (uint32_t)reaped;
    return true;
}

// Gives the batch to the engine, and leaves in `batch` what was refused. False: the engine broke.
static bool push_batch(tm_queue *q) {
    size_t pushed = 0;
    for (; pushed < q->batch.size(); ++pushed) {
        const uint32_t index = q->batch[pushed];
        int64_t result = 0;
        const tm_push answer = q->engine->push(q->engine_state, &q->slots[index].request, &result);
        if (answer == TM_PUSH_FULL)
            break;
        if (answer == TM_PUSH_DONE)
            q->completions[q->num_ended++] = {index, result};
        else
            ++q->num_inside;
        if (q->is_single && answer == TM_PUSH_QUEUED && !reap(q, TM_REAP_LOOK))
            return false;
    }
    q->batch.erase(q->batch.begin(), q->batch.begin() + (ptrdiff_t)pushed);
    return true;
}

// One turn: look at what ended, choose, push, sleep until something ends. False when it was the last.
static bool turn(tm_queue *q) {
    bool has_news;
    const bool goes_on = choose(q, &has_news);
    // Waiters are told at once while the device has work; when it has none, it gets its work first.
    const bool is_starving = q->num_inside == 0 && !q->batch.empty();
    if (has_news && !is_starving)
        q->tag_answered.notify_all();
    if (!goes_on)
        return false;
    if (q->is_backing_off && q->num_inside == 0)
        std::this_thread::sleep_for(PAUSE);
    if (!push_batch(q))
        return false;
    if (has_news && is_starving) {
        const bool is_sound = reap(q, TM_REAP_LOOK);
        q->tag_answered.notify_all();
        if (!is_sound || q->num_ended > 0)
            return is_sound;
    }
    // Asleep with refused blocks only while something is in flight, whose end makes room.
    const bool may_sleep = q->num_ended == 0 && (q->batch.empty() || q->num_inside > 0);
    return reap(q, may_sleep ? TM_REAP_WAIT : TM_REAP_LOOK);
}

// The engine itself broke, and is closed by now, so that no buffer is written any more.
static void fail_everything(tm_queue *q) {
    const int64_t now = tm_now_ns();
    std::lock_guard<std::mutex> lock(q->mutex);
    q->again.clear();
    for (uint32_t index = 0; index < q->slots.size(); ++index)
        if (q->slots[index].tag)
            end_slot(q, index, q->failure, now);
    while (tm_waiting *op = tm_list_first(q)) {
        tm_tag *tag = op->tag;
        tm_tag_note_error(tag, q->failure, op->fd, op->kind, op->offset, op->length);
        tm_tag_drop_waiting(q, tag);
        tm_tag_answer_if_ended(q, tag, tm_now_ns());
    }
    q->tag_answered.notify_all();
}

void tm_queue_serve(tm_queue *q) {
    while (turn(q))
        continue;
    q->engine->close(q->engine_state);
    if (q->failure != 0)
        fail_everything(q);
}
