// program: what callers ask of a step program. See program.h for its parts, tiermem.h for the way of a tile.

#include "program.h"

#include <algorithm>
#include <chrono>
#include <errno.h>
#include <new>
#include <signal.h>
#include <string.h>
#include <unistd.h>
#include <utility>

static const int64_t MAX_TIMEOUT_NS = 1ll << 55; // a year; keeps deadlines from overflowing

typedef std::unique_lock<std::mutex> Lock;

tm_unit_left *tm_program_find_unit(tm_program *p, uint32_t unit) {
    const auto is_before = [](const tm_unit_left &left, uint32_t number) { return left.unit < number; };
    const auto found = std::lower_bound(p->units.begin(), p->units.end(), unit, is_before);
    return found == p->units.end() || found->unit != unit ? nullptr : &*found;
}

void tm_program_promote(tm_strip *strip) {
    for (const tm_flight &flight : strip->flights)
        tm_queue_promote(flight.queue, flight.tag, TM_URGENT); // -ENOENT: it has just ended
}

// Waits for `holds` at most timeout_ns; false: it does not hold.
template <class Holds>
static bool wait_until(std::condition_variable *changed, Lock *lock, int64_t timeout_ns, Holds holds) {
    if (timeout_ns < 0 || timeout_ns > MAX_TIMEOUT_NS)
        timeout_ns = MAX_TIMEOUT_NS;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    return changed->wait_until(*lock, deadline, holds);
}

// ---- open and close -------------------------------------------------------------------------------------------------

int tm_program_open(tm_workers *workers, uint64_t least_bytes, tm_program **program) {
    if (!program)
        return -EINVAL;
    std::unique_ptr<tm_program> made(new (std::nothrow) tm_program(least_bytes));
    if (!made)
        return -ENOMEM;
    made->owner = getpid();
    made->workers = workers;
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int answer = 0;
    try {
        made->thread = std::thread(tm_program_serve, made.get());
    } catch (...) {
        answer = -EAGAIN; // no more threads for this process
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (answer == 0)
        *program = made.release();
    return answer;
}

int tm_program_close(tm_program *program) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    {
        Lock lock(program->mutex);
        program->is_stopping = program->is_closing = true;
    }
    program->bell.ring();
    program->thread.join();
    delete program;
    return 0;
}

// ---- begin and run --------------------------------------------------------------------------------------------------

static bool is_valid(const tm_tile &tile) {
    return (tile.reads || !tile.num_reads) && (tile.checks || !tile.num_checks) && (tile.steps || !tile.num_steps) &&
           (tile.sums || !tile.num_sums) && (tile.writes || !tile.num_writes) && (tile.columns || !tile.num_columns) &&
           (tile.flags & ~(uint32_t)(TM_TILE_CALLED | TM_TILE_BEGUN | TM_TILE_BROUGHT)) == 0;
}

// What a call gives: tiles of a phase, and the buffers that they pass.
struct Given {
    tm_program_phase phase;
    void *const *buffers;
    uint32_t num_buffers;
    uint64_t buffer_bytes;
    const tm_tile *tiles;
    uint32_t n, total;
    int32_t priority;
    uint32_t flags;
};

static tm_program_tile copy_of(const tm_tile &given, tm_program_phase phase) {
    tm_program_tile tile;
    tile.key = given.key;
    tile.unit = given.unit;
    tile.flags = given.flags;
    tile.turn = given.turn;
    tile.reads.assign(given.reads, given.reads + given.num_reads);
    tile.checks.assign(given.checks, given.checks + given.num_checks);
    if (phase == TM_PHASE_BEGUN)
        return tile;
    tile.weights = (char *)given.weights;
    tile.weight_bytes = given.weight_bytes;
    tile.steps.reserve(given.num_steps);
    tile.numbers.reserve(given.num_steps);
    for (uint32_t i = 0; i < given.num_steps; ++i) {
        tile.steps.push_back(*given.steps[i]);
        tm_step *step = &tile.steps.back();
        if (!step->numbers)
            continue; // the step is refused
        tile.numbers.push_back(*step->numbers);
        step->numbers = &tile.numbers.back();
    }
    tile.sums.assign(given.sums, given.sums + given.num_sums);
    tile.writes.assign(given.writes, given.writes + given.num_writes);
    tile.columns.assign(given.columns, given.columns + given.num_columns);
    return tile;
}

typedef std::deque<tm_program_tile> Tiles;

static Tiles::iterator find_tile(Tiles *tiles, uint64_t key) {
    return std::find_if(tiles->begin(), tiles->end(), [&](const tm_program_tile &tile) { return tile.key == key; });
}

static int check_given(const tm_program *p, const Given &given) {
    if ((given.n > 0 && !given.tiles) || !std::all_of(given.tiles, given.tiles + given.n, is_valid))
        return -EINVAL;
    if (p->is_closing)
        return -ESHUTDOWN;
    return p->phase == TM_PHASE_IDLE || (given.phase == TM_PHASE_RUN && p->phase == TM_PHASE_BEGUN) ? 0 : -EBUSY;
}

static void note_queues(const std::vector<tm_transfer> &transfers, std::vector<tm_queue *> *queues) {
    for (const tm_transfer &each : transfers)
        if (std::find(queues->begin(), queues->end(), each.queue) == queues->end())
            queues->push_back(each.queue);
}

// Copies of the given tiles, and the queues that they use; may throw bad_alloc.
static int copy_tiles(const Given &given, Tiles *tiles, std::vector<tm_queue *> *queues) {
    const char *buffer = given.num_buffers ? (const char *)given.buffers[0] : nullptr;
    for (uint32_t i = 0; i < given.n; ++i) {
        tm_program_tile tile = copy_of(given.tiles[i], given.phase);
        if (given.flags & (TM_RUN_ONE_READ | TM_RUN_ONE_WRITE))
            tile.columns.clear();
        if (tm_program_needs_room(&tile) && !buffer)
            return -ENOBUFS;
        const int code = tm_tile_cut(&tile, buffer, given.buffer_bytes);
        if (code < 0)
            return code;
        note_queues(tile.reads, queues);
        note_queues(tile.writes, queues);
        tiles->push_back(std::move(tile));
    }
    return 0;
}

// Where a tile waits for its buffer: behind urgent ones and those whose turn is not later.
static std::vector<uint32_t>::iterator place_in_order(tm_program *p, const tm_program_tile &placed) {
    const auto first = p->order.begin() + p->num_admitted;
    auto at = placed.flags & TM_TILE_BEGUN ? first : p->order.end();
    while (at != first && !p->tiles[at[-1]].is_urgent && p->tiles[at[-1]].turn > placed.turn)
        --at;
    return at;
}

// Counts the tiles from `first` on, for which `order` and `units` have room: begun ones first, which have their
// buffers.
static void enlist(tm_program *p, size_t first) {
    for (size_t index = first; index < p->tiles.size(); ++index) {
        tm_program_tile *placed = &p->tiles[index];
        placed->index = (uint32_t)index;
        p->order.insert(place_in_order(p, *placed), placed->index);
        p->num_admitted += (placed->flags & TM_TILE_BEGUN) != 0;
        tm_unit_left *left = tm_program_find_unit(p, placed->unit);
        if (!left) {
            const auto is_after = [](uint32_t unit, const tm_unit_left &other) { return unit < other.unit; };
            const auto at = std::upper_bound(p->units.begin(), p->units.end(), placed->unit, is_after);
            left = &*p->units.insert(at, {placed->unit, 0, 0});
        }
        ++left->num_unstepped;
        ++left->num_open;
    }
}

// The tiles of the run that go on from what was begun, in the order of `active`. -EINVAL: one of them was not begun, or
// one that was begun is not among them. May throw bad_alloc.
static int find_begun(tm_program *p, Tiles *tiles, std::vector<tm_program_tile *> *found) {
    const auto num_begun = std::count_if(tiles->begin(), tiles->end(),
                                         [](const tm_program_tile &tile) { return (tile.flags & TM_TILE_BEGUN) != 0; });
    if (p->phase != TM_PHASE_BEGUN)
        return num_begun ? -EINVAL : 0;
    if ((size_t)num_begun != p->tiles.size())
        return -EINVAL; // the rest of the begun ones would be lost
    for (const tm_program_tile &begun : p->tiles)
        if (find_tile(tiles, begun.key) == tiles->end())
            return -EINVAL;
    for (tm_strip *strip : p->active) {
        tm_program_tile *tile = &*find_tile(tiles, strip->tile->key);
        tm_strip_reserve(strip, tile);
        found->push_back(tile);
    }
    return 0;
}

static void go_on(tm_program *p, tm_strip *strip, tm_program_tile *tile) {
    tile->times = strip->tile->times;
    tile->has_failed = strip->tile->has_failed;
    tile->num_made = 1;
    strip->tile = tile;
    tm_strip_fill(p, strip);
}

// Makes the given tiles the program's; may throw bad_alloc before anything is changed.
static int set_tiles(tm_program *p, const Given &given) {
    Tiles tiles;
    std::vector<tm_queue *> queues;
    int code = copy_tiles(given, &tiles, &queues);
    std::vector<tm_program_tile *> begun;
    if (code == 0)
        code = find_begun(p, &tiles, &begun);
    if (code < 0)
        return code;
    std::vector<uint32_t> order;
    std::vector<tm_unit_left> units;
    std::vector<uint32_t> used_parts(given.num_buffers);
    std::vector<int> free_buffers;
    order.reserve(given.total);
    units.reserve(given.total);
    free_buffers.reserve(given.num_buffers);
    char *const *first = (char *const *)given.buffers;
    std::vector<char *> buffers(first, first + given.num_buffers);
    for (uint32_t i = given.num_buffers; i > 0; --i) {
        const auto has_it = [&](const tm_strip *strip) { return strip->room.buffer == (int)i - 1; };
        if (std::none_of(p->active.begin(), p->active.end(), has_it))
            free_buffers.push_back((int)i - 1);
    }
    if (p->phase != TM_PHASE_BEGUN)
        p->failure = {};
    const uint64_t failed = p->failure.error ? p->tiles[p->failure.tile].key : 0;
    p->tiles.swap(tiles);
    p->queues.swap(queues);
    p->order.swap(order);
    p->units.swap(units);
    p->buffers.swap(buffers);
    p->free_buffers.swap(free_buffers);
    p->used_parts.swap(used_parts);
    p->free_parts.clear();
    p->buffer_bytes = given.buffer_bytes;
    p->num_admitted = 0;
    p->num_total = given.total;
    p->cut = nullptr;
    p->is_stopping = p->failure.error != 0;
    for (size_t i = 0; i < begun.size(); ++i)
        go_on(p, p->active[i], begun[i]);
    enlist(p, 0);
    if (p->failure.error != 0)
        p->failure.tile = find_tile(&p->tiles, failed)->index;
    return 0;
}

static int begin_phase(tm_program *p, const Given &given) {
    if (!p || (given.num_buffers > 0 && !given.buffers) || given.n > given.total)
        return -EINVAL;
    if (p->owner != getpid())
        return -EPIPE;
    {
        Lock lock(p->mutex);
        int code = check_given(p, given);
        if (code < 0)
            return code;
        try {
            code = set_tiles(p, given);
        } catch (...) {
            code = -ENOMEM;
        }
        if (code < 0)
            return code;
        p->phase = given.phase;
        p->priority = given.priority;
        p->flags = given.flags;
        p->waiting_since_ns = tm_now_ns();
        if (given.phase == TM_PHASE_BEGUN)
            tm_program_admit(p); // the run finds each of them with its buffer
    }
    p->bell.ring();
    return 0;
}

int tm_program_begin(tm_program *program, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                     const tm_tile *tiles, uint32_t n) {
    n = n < num_buffers ? n : num_buffers;
    return begin_phase(program, {TM_PHASE_BEGUN, buffers, num_buffers, buffer_bytes, tiles, n, n, TM_BACKGROUND, 0});
}

int tm_program_run(tm_program *program, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                   const tm_tile *tiles, uint32_t n, uint32_t total, int32_t priority, uint32_t flags) {
    const uint32_t known = TM_RUN_ONE_READ | TM_RUN_ONE_WRITE | TM_RUN_AWAITED;
    if (priority < TM_URGENT || priority > TM_BACKGROUND || (flags & ~known))
        return -EINVAL;
    return begin_phase(program, {TM_PHASE_RUN, buffers, num_buffers, buffer_bytes, tiles, n, total, priority, flags});
}

int tm_program_add(tm_program *program, const tm_tile *tiles, uint32_t n) {
    if (!program || (n > 0 && !tiles))
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    {
        Lock lock(program->mutex);
        if (program->phase != TM_PHASE_RUN)
            return 1;
        const auto is_more = [](const tm_tile &tile) { return is_valid(tile) && !(tile.flags & TM_TILE_BEGUN); };
        if (n > program->num_total - program->tiles.size() || !std::all_of(tiles, tiles + n, is_more))
            return -EINVAL;
        try {
            Tiles copies;
            const Given given = {TM_PHASE_RUN,
                                 (void *const *)program->buffers.data(),
                                 (uint32_t)program->buffers.size(),
                                 program->buffer_bytes,
                                 tiles,
                                 n,
                                 n,
                                 program->priority,
                                 program->flags};
            const int code = copy_tiles(given, &copies, &program->queues);
            if (code < 0)
                return code;
            const size_t first = program->tiles.size();
            program->tiles.insert(program->tiles.end(), std::make_move_iterator(copies.begin()),
                                  std::make_move_iterator(copies.end()));
            enlist(program, first);
        } catch (...) {
            return -ENOMEM;
        }
    }
    program->bell.ring();
    return 0;
}

// ---- work that is not native ----------------------------------------------------------------------------------------

// The first tile of an urgent unit, else the first.
static tm_strip *offered(const tm_program *p) {
    tm_strip *first = nullptr;
    for (tm_strip *strip : p->active) {
        if (strip->state != TM_OFFERED)
            continue;
        const bool is_urgent = strip->tile->is_urgent, other = first && first->tile->is_urgent;
        if (!first || is_urgent > other || (is_urgent == other && strip->tile->index < first->tile->index))
            first = strip;
    }
    return first;
}

int tm_program_next(tm_program *program, int64_t timeout_ns, uint64_t *tile, int32_t *buffer) {
    if (!program || !tile || !buffer)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    tm_strip *found = nullptr;
    const auto holds = [&] { return (found = offered(program)) || program->phase != TM_PHASE_RUN; };
    if (!wait_until(&program->called, &lock, timeout_ns, holds))
        return -ETIMEDOUT;
    if (!found)
        return 1;
    found->state = TM_CALLED;
    if (found->tile->flags & TM_TILE_CALLED)
        found->tile->times.step_ns[0] = tm_now_ns();
    *tile = found->tile->index;
    *buffer = found->room.buffer;
    return 0;
}

int tm_program_done(tm_program *program, uint64_t tile, int32_t error) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    {
        Lock lock(program->mutex);
        const auto is_it = [&](const tm_strip *each) { return each->state == TM_CALLED && each->tile->index == tile; };
        const auto found = std::find_if(program->active.begin(), program->active.end(), is_it);
        if (found == program->active.end())
            return -EINVAL;
        tm_strip *strip = *found;
        if (strip->tile->flags & TM_TILE_CALLED)
            strip->tile->times.step_ns[1] = tm_now_ns();
        strip->state = TM_COMPUTED;
        if (error != 0 && program->failure.error == 0) {
            program->failure.error = error;
            program->failure.during = TM_DURING_STEP;
            program->failure.tile = tile;
        }
        if (error != 0)
            strip->has_failed = strip->tile->has_failed = program->is_stopping = true;
    }
    program->bell.ring();
    return 0;
}

// ---- wait and take --------------------------------------------------------------------------------------------------

// Its tiles that have no buffer get the next ones; the others' transfers go first.
static void make_urgent(tm_program *p, uint32_t unit) {
    for (tm_strip *strip : p->active)
        if (strip->tile->unit == unit) {
            strip->tile->is_urgent = true;
            tm_program_promote(strip);
        }
    const auto rest = p->order.begin() + p->num_admitted;
    const auto is_its = [&](uint32_t index) { return p->tiles[index].unit == unit; };
    for (auto each = rest; each != p->order.end(); ++each)
        p->tiles[*each].is_urgent |= is_its(*each);
    std::stable_partition(rest, p->order.end(), is_its);
}

int tm_program_wait(tm_program *program, int64_t unit, int32_t is_written, int64_t timeout_ns) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    const auto is_reached = [&] {
        if (unit < 0)
            return program->phase != TM_PHASE_RUN;
        const tm_unit_left *left = tm_program_find_unit(program, (uint32_t)unit);
        return !left || (is_written ? left->num_open : left->num_unstepped) == 0;
    };
    const auto is_over = [&] { return program->phase != TM_PHASE_RUN; };
    if (unit >= 0 && timeout_ns != 0 && !is_reached() && !is_over())
        make_urgent(program, (uint32_t)unit);
    if (!wait_until(&program->changed, &lock, timeout_ns, [&] { return is_reached() || is_over(); }))
        return -ETIMEDOUT;
    return is_reached() && (unit >= 0 || !program->is_stopping) ? 0 : 1;
}

int tm_program_await(tm_program *program, uint64_t tile, int64_t timeout_ns) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    if (tile >= program->tiles.size())
        return -EINVAL;
    const auto is_over = [&] { return program->phase != TM_PHASE_RUN; };
    const auto is_stepped = [&] { return program->tiles[tile].is_stepped(); };
    if (timeout_ns != 0 && !is_stepped() && !is_over())
        make_urgent(program, program->tiles[tile].unit);
    if (!wait_until(&program->changed, &lock, timeout_ns, [&] { return is_over() || is_stepped(); }))
        return -ETIMEDOUT;
    return is_stepped() ? 0 : 1;
}

int tm_program_take(tm_program *program, uint64_t tile, void *to) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    if (tile >= program->tiles.size() || (to && !program->tiles[tile].weights))
        return -EINVAL;
    tm_program_tile *found = &program->tiles[tile];
    found->wanted_at = nullptr;
    if (!to)
        return 0;
    if (found->num_ended > 0) {
        const auto is_over = [&] { return found->is_ended() || program->phase != TM_PHASE_RUN; };
        if (!is_over())
            make_urgent(program, found->unit);
        wait_until(&program->changed, &lock, -1, is_over);
        return !found->is_ended();
    }
    for (const tm_strip *strip : program->active)
        if (strip->tile == found && strip->is_stepped)
            memcpy((char *)to + strip->weights_first, strip->weights, strip->weight_bytes);
    if (!found->is_stepped())
        found->wanted_at = (char *)to;
    return 1;
}

int tm_program_forget(tm_program *program, uint32_t unit) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    for (tm_program_tile &tile : program->tiles)
        if (tile.unit == unit)
            for (tm_transfer &read : tile.reads)
                read.cached = nullptr;
    for (tm_strip *strip : program->active) // begun ones, whose run has come
        if (strip->tile->unit == unit)
            for (tm_transfer &read : strip->reads)
                read.cached = nullptr;
    return 0;
}

// ---- quiet, stop, report --------------------------------------------------------------------------------------------

static bool is_quiet(const tm_program *p) {
    const auto is_under_way = [](const tm_strip *strip) { return !strip->flights.empty(); };
    const bool awaits_tiles = p->active.empty() && p->num_admitted == p->tiles.size() && !p->cut;
    return (p->phase != TM_PHASE_RUN || awaits_tiles) && std::none_of(p->active.begin(), p->active.end(), is_under_way);
}

int tm_program_quiet(tm_program *program) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    wait_until(&program->changed, &lock, -1, [&] { return is_quiet(program); });
    return 0;
}

int tm_program_under_way(tm_program *program, uint64_t *bytes) {
    if (!program || !bytes)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    *bytes = std::min(program->pace.limit(), program->buffers.size() * program->buffer_bytes);
    return 0;
}

int tm_program_stop(tm_program *program) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    if (program->phase == TM_PHASE_IDLE)
        return 0;
    program->is_stopping = true;
    program->bell.ring();
    wait_until(&program->changed, &lock, -1, [&] { return program->phase == TM_PHASE_IDLE; });
    return 0;
}

int tm_program_report(tm_program *program, tm_tile_times *times, uint64_t n, tm_failure *failure) {
    if (!program || !failure)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    *failure = program->failure;
    if (!times)
        return (int)program->tiles.size();
    if (program->phase == TM_PHASE_RUN)
        return -EBUSY;
    if (n != program->tiles.size())
        return -EINVAL;
    for (uint64_t i = 0; i < n; ++i)
        times[i] = program->tiles[i].times;
    return (int)n;
}
