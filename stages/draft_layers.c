/* Decoder layers of the common shape (draft_layer.py) for a few rows of a draft tree, in float32.
 *
 * One call runs several layers from their descriptions (Layer, made once) and that of the step
 * (Step). Between the products there is so little to do that calling for it costs more than doing
 * it. Only what a row may see is read: keys of other branches are not multiplied by 0, but passed
 * over, whatever they hold.
 */
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "draft_attention.h"

/* All fields have 8 bytes, in the order of compiled_layers.py. NULL is what a layer has not. */
typedef struct {
    const float *before, *after;   /* the norms' weights, (hidden,) */
    const float *q_norm, *k_norm;  /* (dim,) */
    const float *bias, *out_bias;  /* of q, k and v joined; (hidden,) */
    Matrix qkv, out, gate_up, down;
    int64_t index, turn;           /* turn: which of the step's; -1: none */
    int64_t window;                /* positions that a row looks at, itself included; 0: all */
    int64_t hidden, inner, heads, kv_heads, dim;
    double eps, scale, multiplier; /* scale: of scores; multiplier: of what is added to hidden */
} Layer;

typedef struct {
    float *hidden;            /* (rows, hidden), changed in place */
    const float *committed;   /* (layers, 2, kv_heads, capacity, dim) */
    float *own;               /* (layers, 2, kv_heads, own_capacity, dim) */
    const uint8_t *seen;      /* (rows, first + rows): whether a row sees a node */
    const int64_t *positions; /* (first + rows,) of the nodes */
    uint8_t *room;            /* what draft_room asks for */
    int64_t rows, first, length, capacity, own_capacity; /* length: committed rows */
    const float *turns[2][2]; /* cos and sin, (rows, dim) */
} Step;

/* The parts of a room. */
typedef struct {
    float *x;        /* (rows, hidden): normed, or a product's */
    float *joined;   /* (rows, heads + 2 kv_heads, dim) */
    float *q;        /* (kv_heads, rows, group, dim) */
    float *attended; /* (rows, heads, dim) */
    float *both;     /* (rows, 2 inner); its first half then (rows, inner) */
    float *states;   /* (threads, kv_heads, rows, group, STATE + dim) */
    void *product;
} Room;

enum { MOST_THREADS = 16, ALIGNED = 64 };

static size_t lay_out(const Layer *layer, ptrdiff_t rows, uint8_t *start, Room *room)
{
    const ptrdiff_t queries = rows * layer->heads;
    const ptrdiff_t widest = layer->inner > layer->hidden ? layer->inner : layer->hidden;
    const ptrdiff_t cols = widest > layer->heads * layer->dim ? widest : layer->heads * layer->dim;
    const ptrdiff_t floats[] = {
        rows * layer->hidden,
        rows * (layer->heads + 2 * layer->kv_heads) * layer->dim,
        queries * layer->dim,
        queries * layer->dim,
        rows * 2 * layer->inner,
        MOST_THREADS * queries * (STATE + layer->dim),
    };
    float **parts[] = {&room->x,    &room->joined, &room->q, &room->attended,
                       &room->both, &room->states};
    size_t used = 0;
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        *parts[i] = (float *)(start + used);
        used += ((size_t)floats[i] * sizeof(float) + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    room->product = start + used;
    return used + product_room(rows, cols);
}

/* width: a multiple of 8, here and below. out may be x. */
LANES static void rms(const float *x, const float *weight, double eps, ptrdiff_t width, float *out)
{
    __m256 sum = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < width; i += 8) {
        const __m256 value = _mm256_loadu_ps(x + i);
        sum = _mm256_fmadd_ps(value, value, sum);
    }
    const __m256 factor = _mm256_set1_ps(1.0f / sqrtf(lanes_sum(sum) / (float)width + (float)eps));
    for (ptrdiff_t i = 0; i < width; i += 8) {
        const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x + i), factor);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(value, _mm256_loadu_ps(weight + i)));
    }
}

/* hidden + multiplier * (x + bias), into hidden. */
LANES static void add(float *hidden, const float *x, const float *bias, double multiplier,
                      ptrdiff_t width)
{
    const __m256 factor = _mm256_set1_ps((float)multiplier);
    for (ptrdiff_t i = 0; i < width; i += 8) {
        __m256 value = _mm256_loadu_ps(x + i);
        if (bias != NULL)
            value = _mm256_add_ps(value, _mm256_loadu_ps(bias + i));
        const __m256 sum = _mm256_fmadd_ps(value, factor, _mm256_loadu_ps(hidden + i));
        _mm256_storeu_ps(hidden + i, sum);
    }
}

/* silu(gate) * up */
LANES static void gated(const float *gate, const float *up, ptrdiff_t width, float *out)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    for (ptrdiff_t i = 0; i < width; i += 8) {
        const __m256 x = _mm256_loadu_ps(gate + i);
        const __m256 below = _mm256_add_ps(one, lanes_exp(_mm256_sub_ps(_mm256_setzero_ps(), x)));
        const __m256 silu = _mm256_div_ps(x, below);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
}

/* One head of one row, rotated by `turn` and scaled, into out; dim is a multiple of 16. */
LANES static void turned(const float *x, const float *const *turn, ptrdiff_t at, ptrdiff_t dim,
                         double scale, float *out)
{
    const __m256 factor = _mm256_set1_ps((float)scale);
    for (ptrdiff_t i = 0; i < dim / 2; i += 8) {
        __m256 low = _mm256_mul_ps(_mm256_loadu_ps(x + i), factor);
        __m256 high = _mm256_mul_ps(_mm256_loadu_ps(x + dim / 2 + i), factor);
        if (turn != NULL) {
            /* Both halves turn by the same angles. */
            const __m256 cos = _mm256_loadu_ps(turn[0] + at + i);
            const __m256 sin = _mm256_loadu_ps(turn[1] + at + i);
            const __m256 first = low;
            low = _mm256_fnmadd_ps(high, sin, _mm256_mul_ps(low, cos));
            high = _mm256_fmadd_ps(first, sin, _mm256_mul_ps(high, cos));
        }
        _mm256_storeu_ps(out + i, low);
        _mm256_storeu_ps(out + dim / 2 + i, high);
    }
}

typedef struct {
    const Layer *layer;
    const Step *step;
    const Room *room;
    const float *keys, *values; /* committed, of this layer */
    ptrdiff_t start;            /* the first committed key that every row sees */
    ptrdiff_t threads;          /* how many there were */
} Attention;

static ptrdiff_t first_seen(const Layer *layer, const Step *step, ptrdiff_t row)
{
    const int64_t start = step->positions[step->first + row] - layer->window + 1;
    if (layer->window == 0 || start < 0)
        return 0;
    return start < step->length ? start : step->length;
}

/* A thread's share of the committed keys that all rows see, over all heads. */
static void attend_committed(void *argument)
{
    Attention *all = argument;
    const Layer *layer = all->layer;
    const Step *step = all->step;
    const ptrdiff_t dim = layer->dim, count = step->rows * layer->heads / layer->kv_heads;
    const ptrdiff_t size = count * layer->kv_heads * (STATE + dim);
    const ptrdiff_t tiles = (step->length - all->start + TILE - 1) / TILE;
    const ptrdiff_t units = tiles * layer->kv_heads;
    const ptrdiff_t index = team_index(), threads = team_count();
    float *states = all->room->states + index * size;
    Tile tile;

    if (index == 0)
        all->threads = threads;
    clear_states(states, count * layer->kv_heads, dim);
    for (ptrdiff_t u = units * index / threads; u < units * (index + 1) / threads; u++) {
        const ptrdiff_t head = u / tiles, begin = all->start + u % tiles * TILE;
        const ptrdiff_t left = step->length - begin;
        tile.count = left < TILE ? left : TILE;
        for (ptrdiff_t j = 0; j < tile.count; j++) {
            const ptrdiff_t at = (head * step->capacity + begin + j) * dim;
            tile.keys[j] = all->keys + at;
            tile.values[j] = all->values + at;
        }
        attend_tile(all->room->q + head * count * dim, states + head * count * (STATE + dim),
                    count, dim, &tile);
    }
}

/* What only row `row` sees: its ancestors, and committed keys that other rows see no more. */
static void attend_own(const Attention *all, ptrdiff_t row, ptrdiff_t head)
{
    const Layer *layer = all->layer;
    const Step *step = all->step;
    const ptrdiff_t dim = layer->dim, nodes = step->first + step->rows;
    const ptrdiff_t group = layer->heads / layer->kv_heads;
    const ptrdiff_t query = (head * step->rows + row) * group;
    const ptrdiff_t own = ((layer->index * 2) * layer->kv_heads + head) * step->own_capacity * dim;
    const float *keys = step->own + own;
    const float *values = keys + layer->kv_heads * step->own_capacity * dim;
    const int64_t position = step->positions[step->first + row];
    Tile tile = {.count = 0};

    for (ptrdiff_t j = first_seen(layer, step, row) - all->start; j < nodes; j++) {
        ptrdiff_t at = (head * step->capacity + all->start + j) * dim;
        if (j >= 0) {
            const int far = layer->window != 0 && position - step->positions[j] >= layer->window;
            if (!step->seen[row * nodes + j] || far)
                continue;
            at = j * dim;
        }
        tile.keys[tile.count] = (j < 0 ? all->keys : keys) + at;
        tile.values[tile.count++] = (j < 0 ? all->values : values) + at;
        if (tile.count == TILE) {
            attend_tile(all->room->q + query * dim, all->room->states + query * (STATE + dim),
                        group, dim, &tile);
            tile.count = 0;
        }
    }
    if (tile.count > 0)
        attend_tile(all->room->q + query * dim, all->room->states + query * (STATE + dim), group,
                    dim, &tile);
}

/* room->joined -> room->attended; the rows' keys and values go into step->own. */
LANES static void attend(const Layer *layer, const Step *step, const Room *room)
{
    const ptrdiff_t dim = layer->dim, group = layer->heads / layer->kv_heads;
    const ptrdiff_t width = (layer->heads + 2 * layer->kv_heads) * dim;
    const ptrdiff_t block = layer->kv_heads * step->own_capacity * dim;
    const ptrdiff_t size = step->rows * layer->heads * (STATE + dim);
    const float *const *turn = layer->turn < 0 ? NULL : step->turns[layer->turn];
    Attention all = {.layer = layer, .step = step, .room = room};

    for (ptrdiff_t row = 0; row < step->rows; row++) {
        float *joined = room->joined + row * width;
        if (layer->bias != NULL)
            add(joined, layer->bias, NULL, 1.0, width);
        for (ptrdiff_t head = 0; head < layer->heads; head++, joined += dim) {
            const ptrdiff_t of = head / group, at = (of * step->rows + row) * group + head % group;
            if (layer->q_norm != NULL)
                rms(joined, layer->q_norm, layer->eps, dim, joined);
            turned(joined, turn, row * dim, dim, layer->scale, room->q + at * dim);
        }
        float *own = step->own + layer->index * 2 * block + (step->first + row) * dim;
        for (ptrdiff_t head = 0; head < layer->kv_heads; head++, joined += dim) {
            if (layer->k_norm != NULL)
                rms(joined, layer->k_norm, layer->eps, dim, joined);
            turned(joined, turn, row * dim, dim, 1.0, own + head * step->own_capacity * dim);
        }
        for (ptrdiff_t head = 0; head < layer->kv_heads; head++, joined += dim)
            memcpy(own + block + head * step->own_capacity * dim, joined,
                   (size_t)dim * sizeof(float));
        const ptrdiff_t start = first_seen(layer, step, row);
        all.start = start > all.start ? start : all.start;
    }
    all.keys = step->committed + layer->index * 2 * layer->kv_heads * step->capacity * dim;
    all.values = all.keys + layer->kv_heads * step->capacity * dim;
    const ptrdiff_t keys = step->length - all.start;
    /* Counted as four times what they are: a product does four in the time. */
    team_run(attend_committed, &all, 8 * keys * step->rows * layer->heads * dim, MOST_THREADS);
    for (ptrdiff_t i = size; i < all.threads * size; i += STATE + dim)
        join_states(room->states + i % size, room->states + i, dim);
    for (ptrdiff_t head = 0; head < layer->kv_heads; head++)
        for (ptrdiff_t row = 0; row < step->rows; row++)
            attend_own(&all, row, head);
    for (ptrdiff_t i = 0; i < step->rows * layer->heads; i++) {
        const ptrdiff_t head = i / (group * step->rows), row = i / group % step->rows;
        const float *state = room->states + i * (STATE + dim);
        float *out = room->attended + (row * layer->heads + head * group + i % group) * dim;
        const __m256 sum = _mm256_set1_ps(state[1]);
        for (ptrdiff_t d = 0; d < dim; d += 8)
            _mm256_storeu_ps(out + d, _mm256_div_ps(_mm256_loadu_ps(state + STATE + d), sum));
    }
}

static void run_layer(const Layer *layer, const Step *step, const Room *room)
{
    const ptrdiff_t hidden = layer->hidden, inner = layer->inner, rows = step->rows;
    const ptrdiff_t heads = layer->heads * layer->dim;

    for (ptrdiff_t r = 0; r < rows; r++)
        rms(step->hidden + r * hidden, layer->before, layer->eps, hidden, room->x + r * hidden);
    multiply(&layer->qkv, room->x, room->joined, rows, hidden,
                 heads + 2 * layer->kv_heads * layer->dim, room->product);
    attend(layer, step, room);
    multiply(&layer->out, room->attended, room->x, rows, heads, hidden, room->product);
    for (ptrdiff_t r = 0; r < rows; r++) {
        float *row = step->hidden + r * hidden, *x = room->x + r * hidden;
        add(row, x, layer->out_bias, layer->multiplier, hidden);
        rms(row, layer->after, layer->eps, hidden, x);
    }
    multiply(&layer->gate_up, room->x, room->both, rows, hidden, 2 * inner, room->product);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *gate = room->both + r * 2 * inner;
        gated(gate, gate + inner, inner, room->both + r * inner);
    }
    multiply(&layer->down, room->both, room->x, rows, inner, hidden, room->product);
    for (ptrdiff_t r = 0; r < rows; r++)
        add(step->hidden + r * hidden, room->x + r * hidden, NULL, layer->multiplier, hidden);
}

/* The layers in a bytes object, which need not be aligned; NULL with an exception set. */
static const char *layers_of(PyObject *given, ptrdiff_t *count)
{
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given, &bytes, &length) < 0)
        return NULL;
    *count = length / (Py_ssize_t)sizeof(Layer);
    if (length == 0 || length % (Py_ssize_t)sizeof(Layer) != 0) {
        PyErr_SetString(PyExc_ValueError, "no whole number of layers was given");
        return NULL;
    }
    return bytes;
}

/* draft_room(layers, rows): the bytes that a step of so many rows through any of them takes. */
PyObject *draft_room(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    size_t most = 0;
    ptrdiff_t layers;
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "layers and rows are needed");
    const char *bytes = layers_of(given[0], &layers);
    const size_t rows = PyLong_AsSize_t(given[1]);
    if (bytes == NULL || PyErr_Occurred())
        return NULL;
    for (ptrdiff_t i = 0; i < layers; i++) {
        Layer layer;
        Room room;
        memcpy(&layer, bytes + (size_t)i * sizeof layer, sizeof layer);
        const size_t size = lay_out(&layer, (ptrdiff_t)rows, NULL, &room);
        most = size > most ? size : most;
    }
    return PyLong_FromSize_t(most);
}

/* draft_layers(layers, step): a step's rows through all of them, one after another. */
PyObject *draft_layers(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    ptrdiff_t layers;
    char *from;
    Py_ssize_t length;
    Step step;
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "layers and a step are needed");
    const char *bytes = layers_of(given[0], &layers);
    if (bytes == NULL || PyBytes_AsStringAndSize(given[1], &from, &length) < 0)
        return NULL;
    if (length != (Py_ssize_t)sizeof step)
        return PyErr_Format(PyExc_ValueError, "no step was given");
    memcpy(&step, from, sizeof step);
    Py_BEGIN_ALLOW_THREADS
    for (ptrdiff_t i = 0; i < layers; i++) {
        Layer layer;
        Room room;
        memcpy(&layer, bytes + (size_t)i * sizeof layer, sizeof layer);
        lay_out(&layer, step.rows, step.room, &room);
        run_layer(&layer, &step, &room);
    }
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

#endif
