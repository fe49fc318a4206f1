// program_strips: the strips of tiles, and the room of each.
//
//     tile     columns, one for each state, the weights, the gradients     [ m m m m | v v v v | w w w w ]
//     strips   ranges of its elements through all columns                  [ m | v | w ] [ m | v | w ] [ m | v | w ]
//     ... room     of a whole tile: a buffer; of a strip: a part of a buffer, which is cut in as many as it holds
//
// As many strips are under way as the disk is fastest with, and as many of a tile are one strip (pace.h). The part that
// was given back last is taken first: so few of them stay in a processor's cache.

#include "program.h"

#include <algorithm>
#include <errno.h>

#include "parts.h"

static bool is_cut(const tm_program_tile *tile) { return tile->num_strips > 1; }

// ---- room -----------------------------------------------------------------------------------------------------------

static uint64_t strip_bytes(const std::vector<tm_column> &columns) {
    uint64_t bytes = 0;
    for (const tm_column &column : columns)
        bytes += column.strip_bytes;
    return bytes;
}

static bool take_buffer(tm_program *p, tm_room *room) {
    if (p->free_buffers.empty())
        return false;
    const int buffer = p->free_buffers.back();
    p->free_buffers.pop_back();
    *room = {buffer, p->buffers[(size_t)buffer], p->buffer_bytes};
    return true;
}

static uint64_t used_bytes(const tm_program *p) {
    uint64_t bytes = 0;
    for (const tm_strip *strip : p->active)
        bytes += is_cut(strip->tile) ? strip->room.bytes : 0;
    return bytes;
}

// Cuts another buffer in parts; may throw bad_alloc before anything is changed.
static bool cut_buffer(tm_program *p, uint64_t bytes) {
    const uint64_t num = p->buffer_bytes / bytes;
    p->free_parts.reserve(p->free_parts.size() + num);
    tm_room whole;
    if (!take_buffer(p, &whole))
        return false;
    for (uint64_t i = num; i > 0; --i)
        p->free_parts.push_back({whole.buffer, whole.data + (i - 1) * bytes, bytes});
    return true;
}

// The last free part that is large enough, and not twice that: strips may have become smaller. May throw bad_alloc
// before anything is changed.
static bool take_part(tm_program *p, uint64_t bytes, tm_room *room) {
    const uint64_t in_use = used_bytes(p);
    if (in_use > 0 && in_use + bytes > p->pace.limit())
        return false;
    const auto fits = [&](const tm_room &part) { return part.bytes >= bytes && part.bytes < 2 * bytes; };
    auto found = std::find_if(p->free_parts.rbegin(), p->free_parts.rend(), fits);
    if (found == p->free_parts.rend()) {
        if (!cut_buffer(p, bytes))
            return false;
        found = p->free_parts.rbegin();
    }
    *room = *found;
    p->free_parts.erase(found.base() - 1);
    ++p->used_parts[(size_t)room->buffer];
    return true;
}

void tm_strip_leave(tm_program *p, tm_strip *strip) {
    const tm_room room = strip->room;
    strip->room = {};
    if (room.buffer < 0)
        return;
    uint32_t *num_used = &p->used_parts[(size_t)room.buffer];
    if (*num_used > 0 && --*num_used > 0) {
        p->free_parts.push_back(room); // it has been there before: there is room for it
        return;
    }
    const auto is_its = [&](const tm_room &part) { return part.buffer == room.buffer; };
    p->free_parts.erase(std::remove_if(p->free_parts.begin(), p->free_parts.end(), is_its), p->free_parts.end());
    p->free_buffers.push_back(room.buffer);
}

// ---- what a strip has of its tile -----------------------------------------------------------------------------------

namespace {

// Addresses that the tile was given, and where the strip has their bytes.
struct Window {
    const char *begin, *end;
    char *to;

    bool holds(const void *address) const { return (const char *)address >= begin && (const char *)address < end; }
};

} // namespace

static size_t num_windows(const tm_strip *strip) {
    return is_cut(strip->tile) ? strip->tile->columns.size() : strip->room.buffer >= 0 ? 1 : 0;
}

static Window window_of(const tm_program *p, const tm_strip *strip, size_t number) {
    if (!is_cut(strip->tile))
        return {p->buffers[0], p->buffers[0] + p->buffer_bytes, strip->room.data};
    char *to = strip->room.data;
    for (size_t i = 0; i < number; ++i)
        to += strip->tile->columns[i].strip_bytes;
    const tm_column &column = strip->tile->columns[number];
    const char *data = (const char *)column.data, *begin = data + strip->number * column.strip_bytes;
    return {begin, std::min(begin + column.strip_bytes, data + column.bytes), to};
}

// Where the strip has a byte; memory that is no part of the first buffer stays where it is.
static char *place_of(const tm_program *p, const tm_strip *strip, const void *address) {
    for (size_t i = 0; i < num_windows(strip); ++i) {
        const Window window = window_of(p, strip, i);
        if (window.holds(address))
            return window.to + ((const char *)address - window.begin);
    }
    return (char *)address;
}

static bool has_place(const tm_program *p, const tm_strip *strip, const void *address) {
    bool has_it = !is_cut(strip->tile);
    for (size_t i = 0; i < num_windows(strip); ++i)
        has_it |= window_of(p, strip, i).holds(address);
    return has_it;
}

static void add_transfers(const tm_program *p, const tm_strip *strip, const std::vector<tm_transfer> &of_tile,
                          std::vector<tm_transfer> *own) {
    for (const tm_transfer &each : of_tile) {
        if (!is_cut(strip->tile)) {
            own->push_back(each);
            own->back().buffer = place_of(p, strip, each.buffer);
            continue;
        }
        const char *data = (const char *)each.buffer;
        for (size_t i = 0; i < num_windows(strip); ++i) {
            const Window window = window_of(p, strip, i);
            const char *begin = std::max(data, window.begin), *end = std::min(data + each.length, window.end);
            if (begin >= end)
                continue;
            tm_transfer part = each;
            part.buffer = window.to + (begin - window.begin);
            part.length = (uint64_t)(end - begin);
            part.offset += (uint64_t)(begin - data);
            part.cached = each.cached ? (const char *)each.cached + (begin - data) : nullptr;
            own->push_back(part);
        }
    }
}

static bool add_piece(const tm_program *p, const tm_strip *strip, const tm_piece &of_tile, std::vector<tm_piece> *own) {
    if (!has_place(p, strip, of_tile.data))
        return false;
    own->push_back(of_tile);
    own->back().data = place_of(p, strip, of_tile.data);
    return true;
}

static void add_checks(const tm_program *p, tm_strip *strip) {
    for (const tm_piece &piece : strip->tile->checks) {
        const bool is_known = !piece.is_known || *piece.is_known;
        if (is_known && add_piece(p, strip, piece, &strip->checks))
            strip->check_numbers.push_back(strip->num_given_checks);
        ++strip->num_given_checks;
    }
}

// The column that holds a part of a step; NULL: none does.
static const tm_column *column_of(const tm_program_tile *tile, const tm_part &part) {
    for (const tm_column &column : tile->columns)
        if (part.dtype != TM_NONE && part.data >= column.data && (char *)part.data < (char *)column.data + column.bytes)
            return &column;
    return nullptr;
}

// The elements of its tile before those of a step, and those of a strip. False: no part of the step lies in a column.
static bool find_elements(const tm_program_tile *tile, const tm_step &step, uint64_t *before, uint64_t *of_strip) {
    for (const tm_part *part : {&step.weight, &step.master, &step.grad, &step.moments[0], &step.moments[1]})
        if (const tm_column *column = column_of(tile, *part)) {
            const uint64_t bytes = tm_dtype_bytes(part->dtype);
            *before = (uint64_t)((char *)part->data - (char *)column->data) / bytes;
            *of_strip = column->strip_bytes / bytes;
            return true;
        }
    return false;
}

static void move_part(const tm_program *p, const tm_strip *strip, uint64_t begin, tm_part *part, const void **source,
                      const uint8_t **source_scales) {
    if (source && *source)
        *source = place_of(p, strip, tm_dtype_at(*source, part->dtype, begin));
    if (source_scales && *source_scales)
        *source_scales = (const uint8_t *)place_of(p, strip, *source_scales + begin / TM_Q8_BLOCK);
    *part = tm_part_at(part, begin);
    part->data = place_of(p, strip, part->data);
    part->scales = (uint8_t *)place_of(p, strip, part->scales);
}

static void add_steps(const tm_program *p, tm_strip *strip) {
    for (const tm_step &of_tile : strip->tile->steps) {
        uint64_t before, numel, begin = 0, end = of_tile.n;
        if (is_cut(strip->tile) && find_elements(strip->tile, of_tile, &before, &numel)) {
            begin = std::max(strip->number * numel, before) - before;
            end = std::min(of_tile.n, std::max((strip->number + 1) * numel, before) - before);
        }
        if (begin >= end)
            continue;
        strip->steps.push_back(of_tile);
        tm_step *own = &strip->steps.back();
        own->n = end - begin;
        own->first_element += begin;
        tm_part *parts[] = {&own->weight, &own->master, &own->moments[0], &own->moments[1], &own->moments[2]};
        for (size_t i = 0; i < 5; ++i)
            move_part(p, strip, begin, parts[i], &own->sources[i], &own->source_scales[i]);
        move_part(p, strip, begin, &own->grad, nullptr, nullptr);
    }
}

static void add_weights(const tm_program *p, tm_strip *strip) {
    const tm_program_tile *tile = strip->tile;
    const char *weights = tile->weights;
    strip->weights = place_of(p, strip, weights);
    strip->weights_first = 0;
    strip->weight_bytes = weights && !is_cut(tile) ? tile->weight_bytes : 0;
    for (size_t i = 0; i < num_windows(strip) && is_cut(tile); ++i) {
        const Window window = window_of(p, strip, i);
        const char *begin = std::max(weights, window.begin), *end = std::min(weights + tile->weight_bytes, window.end);
        if (begin >= end)
            continue;
        strip->weights = window.to + (begin - window.begin);
        strip->weights_first = (uint64_t)(begin - weights);
        strip->weight_bytes = (uint64_t)(end - begin);
    }
}

// ---- the cut of a tile ----------------------------------------------------------------------------------------------

// Whether columns lie in the first buffer, and have the same number of strips, whose room a buffer holds.
static bool is_table(const tm_program_tile *tile, const char *buffer, uint64_t buffer_bytes) {
    for (const tm_column &column : tile->columns) {
        const char *data = (const char *)column.data;
        if (data < buffer || data + column.bytes > buffer + buffer_bytes || column.strip_bytes == 0 ||
            (column.bytes + column.strip_bytes - 1) / column.strip_bytes != tile->num_strips)
            return false;
    }
    return buffer && strip_bytes(tile->columns) <= buffer_bytes;
}

static bool is_in_columns(const tm_program_tile *tile, const void *memory, uint64_t length) {
    const char *data = (const char *)memory;
    uint64_t bytes = 0;
    for (const tm_column &column : tile->columns) {
        const char *first = (const char *)column.data;
        const char *begin = std::max(data, first), *end = std::min(data + length, first + column.bytes);
        bytes += begin < end ? (uint64_t)(end - begin) : 0;
    }
    return bytes == length;
}

static bool has_bytes(const tm_program_tile *tile) {
    const auto is_in = [&](const tm_transfer &each) { return is_in_columns(tile, each.buffer, each.length); };
    return std::all_of(tile->reads.begin(), tile->reads.end(), is_in) &&
           std::all_of(tile->writes.begin(), tile->writes.end(), is_in) &&
           is_in_columns(tile, tile->weights, tile->weights ? tile->weight_bytes : 0);
}

static bool is_in_strips(const tm_program_tile *tile, const std::vector<tm_piece> &pieces) {
    for (const tm_piece &piece : pieces) {
        bool is_in_one = false;
        for (const tm_column &column : tile->columns) {
            const char *data = (const char *)piece.data, *first = (const char *)column.data;
            if (data < first || piece.bytes == 0 || data + piece.bytes > first + column.bytes)
                continue;
            const uint64_t begin = (uint64_t)(data - first), last = begin + piece.bytes - 1;
            is_in_one |= begin / column.strip_bytes == last / column.strip_bytes;
        }
        if (!is_in_one)
            return false;
    }
    return true;
}

static bool has_elements(const tm_program_tile *tile) {
    for (const tm_step &step : tile->steps) {
        uint64_t before, numel;
        if (!find_elements(tile, step, &before, &numel))
            return false;
        const auto is_q8 = [](const tm_part &moment) { return tm_dtype_is_q8(moment.dtype); };
        if (std::any_of(step.moments, step.moments + 3, is_q8) && (before % TM_Q8_BLOCK || numel % TM_Q8_BLOCK))
            return false;
    }
    return true;
}

int tm_tile_cut(tm_program_tile *tile, const char *buffer, uint64_t buffer_bytes) {
    tile->num_strips = 1;
    if (tile->columns.empty() || tile->flags != 0 || !tm_program_needs_room(tile))
        return 0;
    const tm_column &first = tile->columns[0];
    tile->num_strips = first.strip_bytes ? (uint32_t)((first.bytes + first.strip_bytes - 1) / first.strip_bytes) : 0;
    if (tile->num_strips == 1)
        return 0;
    const bool is_whole = is_table(tile, buffer, buffer_bytes) && has_bytes(tile) && is_in_strips(tile, tile->checks) &&
                          is_in_strips(tile, tile->sums) && has_elements(tile);
    return is_whole ? 0 : -EINVAL;
}

// ---- strips ---------------------------------------------------------------------------------------------------------

void tm_strip_reserve(tm_strip *strip, const tm_program_tile *tile) {
    const size_t num_columns = tile->columns.size(), num_checks = strip->checks.size() + tile->checks.size();
    const size_t num_reads = tile->reads.size() + num_columns, num_writes = tile->writes.size() + num_columns;
    const size_t num_pieces = num_checks + tile->sums.size();
    strip->reads.reserve(num_reads);
    strip->writes.reserve(num_writes);
    strip->checks.reserve(num_checks);
    strip->check_numbers.reserve(num_checks);
    strip->sums.reserve(tile->sums.size());
    strip->steps.reserve(tile->steps.size());
    strip->flights.reserve(strip->flights.size() + num_reads + num_writes);
    strip->ops.reserve(std::max(num_reads, num_writes));
    strip->addresses.resize(num_pieces);
    strip->bytes.resize(num_pieces);
    strip->crcs.resize(num_pieces);
}

void tm_strip_fill(const tm_program *p, tm_strip *strip) {
    const tm_program_tile *tile = strip->tile;
    strip->is_due = true;
    strip->reads.clear();
    add_transfers(p, strip, tile->reads, &strip->reads);
    add_transfers(p, strip, tile->writes, &strip->writes);
    add_weights(p, strip);
    add_checks(p, strip);
    for (const tm_piece &piece : tile->sums)
        add_piece(p, strip, piece, &strip->sums);
    add_steps(p, strip);
}

bool tm_program_needs_room(const tm_program_tile *tile) {
    return !tile->reads.empty() || !tile->writes.empty() || (tile->flags & (TM_TILE_BEGUN | TM_TILE_BROUGHT));
}

// Before its first strip is made: several of those that its columns say are one, as the pace wants it. A tile has two
// or more still.
static void join_strips(const tm_program *p, tm_program_tile *tile) {
    const tm_column &first = tile->columns[0];
    const uint64_t own_bytes = first.strip_bytes / tile->num_joined;
    const uint64_t num_own = (first.bytes + own_bytes - 1) / own_bytes;
    const uint64_t num_with_room = p->buffer_bytes / (strip_bytes(tile->columns) / tile->num_joined);
    const uint64_t num = std::min({(uint64_t)p->pace.strips_at_once(), num_own / 2, num_with_room});
    for (tm_column &column : tile->columns)
        column.strip_bytes = column.strip_bytes / tile->num_joined * num;
    tile->num_joined = (uint32_t)num;
    tile->num_strips = (uint32_t)((num_own + num - 1) / num);
}

static tm_strip *take_idle(tm_program *p) {
    if (p->idle.empty()) {
        p->idle.reserve(p->strips.size() + 1);
        p->active.reserve(p->strips.size() + 1);
        p->strips.push_back(std::make_unique<tm_strip>());
        p->idle.push_back(p->strips.back().get());
    }
    tm_strip *strip = p->idle.back();
    strip->reads.clear();
    strip->writes.clear();
    strip->checks.clear();
    strip->check_numbers.clear();
    strip->sums.clear();
    strip->steps.clear();
    strip->flights.clear();
    strip->num_given_checks = 0;
    strip->is_stepped = strip->has_failed = false;
    strip->state = TM_READING;
    return strip;
}

tm_strip *tm_strip_make(tm_program *p, tm_program_tile *tile, int *error) {
    *error = 0;
    if (is_cut(tile) && tile->num_made == 0)
        join_strips(p, tile);
    try {
        tm_strip *strip = take_idle(p);
        tm_strip_reserve(strip, tile);
        strip->tile = tile;
        strip->number = tile->num_made;
        if (tm_program_needs_room(tile) &&
            !(is_cut(tile) ? take_part(p, strip_bytes(tile->columns), &strip->room) : take_buffer(p, &strip->room)))
            return nullptr;
        tm_strip_fill(p, strip);
        p->idle.pop_back();
        p->active.push_back(strip);
        ++tile->num_made;
        return strip;
    } catch (...) {
        *error = -ENOMEM;
        return nullptr;
    }
}
