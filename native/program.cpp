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

char *tm_program_place(const tm_program *p, const tm_program_tile *tile, const void *address) {
    char *at = (char *)address;
    if (tile->buffer < 0 || at < p->buffers[0] || at >= p->buffers[0] + p->buffer_bytes)
        return at;
    return p->buffers[(size_t)tile->buffer] + (at - p->buffers[0]);
}

tm_unit_left *tm_program_find_unit(tm_program *p, uint32_t unit) {
    const auto is_before = [](const tm_unit_left &left, uint32_t number) { return left.unit < number; };
    const auto found = std::lower_bound(p->units.begin(), p->units.end(), unit, is_before);
    return found == p->units.end() || found->unit != unit ? nullptr : &*found;
}

void tm_program_promote(tm_program_tile *tile) {
    for (const tm_flight &flight : tile->flights)
        tm_queue_promote(flight.queue, flight.tag, TM_URGENT); // -ENOENT: it has just ended
}

// Waits for `holds` at most timeout_ns; false: it does not hold.
template <class Holds> static bool wait_until(tm_program *p, Lock *lock, int64_t timeout_ns, Holds holds) {
    if (timeout_ns < 0 || timeout_ns > MAX_TIMEOUT_NS)
        timeout_ns = MAX_TIMEOUT_NS;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    return p->changed.wait_until(*lock, deadline, holds);
}

// ---- open and close -------------------------------------------------------------------------------------------------

int tm_program_open(tm_workers *workers, tm_program **program) {
    if (!program)
        return -EINVAL;
    std::unique_ptr<tm_program> made(new (std::nothrow) tm_program);
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
           (tile.sums || !tile.num_sums) && (tile.writes || !tile.num_writes) &&
           (tile.flags & ~(uint32_t)(TM_TILE_CALLED | TM_TILE_BEGUN | TM_TILE_BROUGHT)) == 0;
}

static void copy_reads(const tm_tile &given, tm_program_tile *tile) {
    tile->key = given.key;
    tile->unit = given.unit;
    tile->flags = given.flags;
    tile->turn = given.turn;
    tile->reads.assign(given.reads, given.reads + given.num_reads);
    tile->checks.assign(given.checks, given.checks + given.num_checks);
}

// Every flight that it can have: at most one for each of its transfers, those of its begin included.
static tm_program_tile copy_of(const tm_tile &given) {
    tm_program_tile tile;
    copy_reads(given, &tile);
    tile.weights = (char *)given.weights;
    tile.weight_bytes = given.weight_bytes;
    for (uint32_t i = 0; i < given.num_steps; ++i)
        tile.steps.push_back(*given.steps[i]);
    tile.sums.assign(given.sums, given.sums + given.num_sums);
    tile.writes.assign(given.writes, given.writes + given.num_writes);
    tile.flights.reserve(std::max(tile.reads.size(), tile.writes.size()));
    tile.ops.reserve(std::max(tile.reads.size(), tile.writes.size()));
    return tile;
}

// A tile of the run goes on from what tm_program_begin made of it. False: it was not begun.
static bool take_over(std::vector<tm_program_tile> *begun, tm_program_tile *tile) {
    for (tm_program_tile &each : *begun) {
        if (each.key != tile->key)
            continue;
        tile->flights.reserve(each.flights.size() + tile->reads.size() + tile->writes.size());
        tile->flights.assign(each.flights.begin(), each.flights.end());
        for (tm_flight &flight : tile->flights)
            flight.times = nullptr; // set when the tile lies in its place
        tile->checks.insert(tile->checks.begin(), each.checks.begin(), each.checks.end());
        tile->times = each.times;
        tile->state = each.state;
        tile->buffer = each.buffer;
        tile->has_failed = each.has_failed;
        return true;
    }
    return false;
}

static bool needs_buffer(const tm_program_tile &tile) {
    return !tile.reads.empty() || !tile.writes.empty() || (tile.flags & (TM_TILE_BEGUN | TM_TILE_BROUGHT));
}

static uint64_t index_of(const std::vector<tm_program_tile> &tiles, uint64_t key) {
    const auto has_key = [&](const tm_program_tile &tile) { return tile.key == key; };
    return (uint64_t)(std::find_if(tiles.begin(), tiles.end(), has_key) - tiles.begin());
}

static int check_given(const tm_program *p, bool is_run, const tm_tile *tiles, uint32_t n) {
    if (n > 0 && !tiles)
        return -EINVAL;
    for (uint32_t i = 0; i < n; ++i)
        if (!is_valid(tiles[i]))
            return -EINVAL;
    if (p->is_closing)
        return -ESHUTDOWN;
    return p->phase == TM_PHASE_IDLE || (is_run && p->phase == TM_PHASE_BEGUN) ? 0 : -EBUSY;
}

// Copies of the given tiles, which go on from what was begun; may throw bad_alloc.
static int copy_tiles(tm_program *p, const tm_tile *given, uint32_t n, bool has_buffers,
                      std::vector<tm_program_tile> *tiles) {
    tiles->reserve(n);
    for (uint32_t i = 0; i < n; ++i) {
        tm_program_tile tile = copy_of(given[i]);
        if (needs_buffer(tile) && !has_buffers)
            return -ENOBUFS;
        if ((given[i].flags & TM_TILE_BEGUN) && (p->phase != TM_PHASE_BEGUN || !take_over(&p->tiles, &tile)))
            return -EINVAL;
        const size_t num_pieces = tile.checks.size() + tile.sums.size();
        tile.addresses.resize(num_pieces);
        tile.bytes.resize(num_pieces);
        tile.crcs.resize(num_pieces);
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

// Adds tiles for which there is room: begun ones first, which have their buffers.
static void append(tm_program *p, std::vector<tm_program_tile> *tiles) {
    for (tm_program_tile &tile : *tiles) {
        const uint32_t index = (uint32_t)p->tiles.size();
        p->tiles.push_back(std::move(tile));
        tm_program_tile *placed = &p->tiles[index];
        for (tm_flight &flight : placed->flights)
            flight.times = placed->times.begun_ns;
        p->order.insert(place_in_order(p, *placed), index);
        if (placed->flags & TM_TILE_BEGUN) {
            ++p->num_admitted;
            p->active.push_back(index);
        }
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

// Makes the given tiles the program's; may throw bad_alloc before anything is changed.
static int set_tiles(tm_program *p, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                     const tm_tile *given, uint32_t n, uint32_t total) {
    std::vector<tm_program_tile> copies, tiles;
    const int code = copy_tiles(p, given, n, num_buffers > 0, &copies);
    if (code < 0)
        return code;
    const auto is_begun = [](const tm_program_tile &tile) { return (tile.flags & TM_TILE_BEGUN) != 0; };
    const auto num_begun = std::count_if(copies.begin(), copies.end(), is_begun);
    if (p->phase == TM_PHASE_BEGUN && (size_t)num_begun != p->tiles.size())
        return -EINVAL; // the rest of the begun ones would be lost
    std::vector<uint32_t> order, active;
    std::vector<tm_unit_left> units;
    std::vector<int> free_buffers;
    tiles.reserve(total);
    order.reserve(total);
    active.reserve(total);
    units.reserve(total);
    std::vector<char *> own_buffers((char *const *)buffers, (char *const *)buffers + num_buffers);
    for (uint32_t i = num_buffers; i > 0; --i) {
        const auto has_it = [&](const tm_program_tile &tile) { return tile.buffer == (int)i - 1; };
        if (std::none_of(copies.begin(), copies.end(), has_it))
            free_buffers.push_back((int)i - 1);
    }
    free_buffers.reserve(num_buffers);
    if (p->phase != TM_PHASE_BEGUN)
        p->failure = {};
    else if (p->failure.error != 0)
        p->failure.tile = index_of(copies, p->tiles[p->failure.tile].key);
    p->tiles.swap(tiles);
    p->order.swap(order);
    p->active.swap(active);
    p->units.swap(units);
    p->buffers.swap(own_buffers);
    p->free_buffers.swap(free_buffers);
    p->buffer_bytes = buffer_bytes;
    p->num_admitted = 0;
    p->num_total = total;
    p->is_stopping = p->failure.error != 0;
    append(p, &copies);
    return 0;
}

static int begin_phase(tm_program *p, tm_program_phase phase, void *const *buffers, uint32_t num_buffers,
                       uint64_t buffer_bytes, const tm_tile *tiles, uint32_t n, uint32_t total, int32_t priority,
                       uint32_t flags) {
    if (!p || (num_buffers > 0 && !buffers) || n > total)
        return -EINVAL;
    if (p->owner != getpid())
        return -EPIPE;
    {
        Lock lock(p->mutex);
        int code = check_given(p, phase == TM_PHASE_RUN, tiles, n);
        if (code < 0)
            return code;
        try {
            code = set_tiles(p, buffers, num_buffers, buffer_bytes, tiles, n, total);
        } catch (...) {
            code = -ENOMEM;
        }
        if (code < 0)
            return code;
        p->phase = phase;
        p->priority = priority;
        p->flags = flags;
        p->waiting_since_ns = tm_now_ns();
        if (phase == TM_PHASE_BEGUN)
            tm_program_admit(p); // the run finds each of them with its buffer
    }
    p->bell.ring();
    return 0;
}

int tm_program_begin(tm_program *program, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                     const tm_tile *tiles, uint32_t n) {
    n = n < num_buffers ? n : num_buffers;
    return begin_phase(program, TM_PHASE_BEGUN, buffers, num_buffers, buffer_bytes, tiles, n, n, TM_BACKGROUND, 0);
}

int tm_program_run(tm_program *program, void *const *buffers, uint32_t num_buffers, uint64_t buffer_bytes,
                   const tm_tile *tiles, uint32_t n, uint32_t total, int32_t priority, uint32_t flags) {
    const uint32_t known = TM_RUN_ONE_READ | TM_RUN_ONE_WRITE | TM_RUN_AWAITED;
    if (priority < TM_URGENT || priority > TM_BACKGROUND || (flags & ~known))
        return -EINVAL;
    return begin_phase(program, TM_PHASE_RUN, buffers, num_buffers, buffer_bytes, tiles, n, total, priority, flags);
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
        if (n > program->num_total - program->tiles.size() || !std::all_of(tiles, tiles + n, is_valid))
            return -EINVAL;
        try {
            std::vector<tm_program_tile> copies;
            const int code = copy_tiles(program, tiles, n, !program->buffers.empty(), &copies);
            if (code < 0)
                return code;
            append(program, &copies);
        } catch (...) {
            return -ENOMEM;
        }
    }
    program->bell.ring();
    return 0;
}

// ---- work that is not native ----------------------------------------------------------------------------------------

// The first tile of an urgent unit, else the first.
static int offered(const tm_program *p) {
    int first = -1;
    for (const uint32_t index : p->active) {
        if (p->tiles[index].state != TM_OFFERED)
            continue;
        const bool is_urgent = p->tiles[index].is_urgent;
        const bool other = first >= 0 && p->tiles[(size_t)first].is_urgent;
        if (first < 0 || is_urgent > other || (is_urgent == other && (int)index < first))
            first = (int)index;
    }
    return first;
}

int tm_program_next(tm_program *program, int64_t timeout_ns, uint64_t *tile, int32_t *buffer) {
    if (!program || !tile || !buffer)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    int found = -1;
    const auto holds = [&] { return (found = offered(program)) >= 0 || program->phase != TM_PHASE_RUN; };
    if (!wait_until(program, &lock, timeout_ns, holds))
        return -ETIMEDOUT;
    if (found < 0)
        return 1;
    program->tiles[(size_t)found].state = TM_CALLED;
    if (program->tiles[(size_t)found].flags & TM_TILE_CALLED)
        program->tiles[(size_t)found].times.step_ns[0] = tm_now_ns();
    *tile = (uint64_t)found;
    *buffer = program->tiles[(size_t)found].buffer;
    return 0;
}

int tm_program_done(tm_program *program, uint64_t tile, int32_t error) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    {
        Lock lock(program->mutex);
        if (tile >= program->tiles.size() || program->tiles[tile].state != TM_CALLED)
            return -EINVAL;
        if (program->tiles[tile].flags & TM_TILE_CALLED)
            program->tiles[tile].times.step_ns[1] = tm_now_ns();
        program->tiles[tile].state = TM_COMPUTED;
        if (error != 0 && program->failure.error == 0) {
            program->failure.error = error;
            program->failure.stage = TM_STAGE_STEP;
            program->failure.tile = tile;
        }
        if (error != 0) {
            program->tiles[tile].has_failed = true;
            program->is_stopping = true;
        }
    }
    program->bell.ring();
    return 0;
}

// ---- wait and take --------------------------------------------------------------------------------------------------

// Its tiles that have no buffer get the next ones; the others' transfers go first.
static void make_urgent(tm_program *p, uint32_t unit) {
    for (const uint32_t index : p->active)
        if (p->tiles[index].unit == unit) {
            p->tiles[index].is_urgent = true;
            tm_program_promote(&p->tiles[index]);
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
    if (!wait_until(program, &lock, timeout_ns, [&] { return is_reached() || is_over(); }))
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
    const auto is_stepped = [&] { return program->tiles[tile].is_stepped; };
    if (timeout_ns != 0 && !is_stepped() && !is_over())
        make_urgent(program, program->tiles[tile].unit);
    if (!wait_until(program, &lock, timeout_ns, [&] { return is_over() || is_stepped(); }))
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
    if (!found->is_stepped) {
        found->wanted_at = (char *)to;
        return 1;
    }
    if (found->state == TM_ENDED)
        return 0;
    memcpy(to, tm_program_place(program, found, found->weights), found->weight_bytes);
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
                read.kept = nullptr;
    return 0;
}

// ---- quiet, stop, report --------------------------------------------------------------------------------------------

static bool is_quiet(const tm_program *p) {
    const auto is_under_way = [](const tm_program_tile &tile) { return !tile.flights.empty(); };
    const bool awaits_tiles = p->active.empty() && p->num_admitted == p->tiles.size();
    return (p->phase != TM_PHASE_RUN || awaits_tiles) && std::none_of(p->tiles.begin(), p->tiles.end(), is_under_way);
}

int tm_program_quiet(tm_program *program) {
    if (!program)
        return -EINVAL;
    if (program->owner != getpid())
        return -EPIPE;
    Lock lock(program->mutex);
    wait_until(program, &lock, -1, [&] { return is_quiet(program); });
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
    wait_until(program, &lock, -1, [&] { return program->phase == TM_PHASE_IDLE; });
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
        return 0;
    if (program->phase == TM_PHASE_RUN)
        return -EBUSY;
    if (n != program->tiles.size())
        return -EINVAL;
    for (uint64_t i = 0; i < n; ++i)
        times[i] = program->tiles[i].times;
    return 0;
}
