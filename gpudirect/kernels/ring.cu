// Device code: ring ends, tiles and one step of an all-reduce. Compiled to ring.ptx by `gpudirect/kernels/check --write`; what the
// driver of a GPU loads is that text.
//
// Each kernel runs as one block. The line format is that of docs/wire.md with order "relaxed": a GPU does not promise that a
// line travels whole, so the check in the completing line decides. Marks are stored with release at system scope, which
// orders the payload before them at the PCIe interface; nothing here ever loads from an aperture, and nothing is an atomic
// read-modify-write outside this block's own memory.
//
// Every wait has a budget of looks, so that every kernel ends whatever the peer does.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// Mirrored field by field in src/kernels.rs. Addresses are device addresses.
struct Sender {
    u64 ring;         // line 0 of the ring, in the peer's memory: stored to, never loaded
    u64 mask;         // lines of the ring less one
    u64 head;         // lines stored so far
    u64 seq;          // sequence of the next message
    u64 credit;       // lines the peer has given back, as last read
    u64 credit_line;  // own memory: the peer stores its credits here
    u64 starved_line; // the peer's memory: where this side says what it waits for
    u64 out_key;      // tag of all that goes to the peer, from bit 32 on; start of the sequence below
    u64 in_tag;       // tag of what the peer stores here
    u64 attempt;      // times the peer was asked for credit
    u64 status;       // STATUS_* of the last kernel
    u64 sent;         // messages sent by the last kernel
};

struct Receiver {
    u64 ring;         // line 0 of the ring, own memory
    u64 mask;
    u64 tail;         // lines consumed so far
    u64 seq;          // sequence of the message that comes next
    u64 credited;     // lines given back
    u64 credit_line;  // the peer's memory: where credits go
    u64 starved_line; // own memory: the peer says here what it waits for
    u64 in_key;       // tag and start of what the peer stores
    u64 out_tag;      // tag of the credits
    u64 status;
    u64 got;          // blocks received by the last kernel
    u64 incomplete;   // times a mark was there and its check did not hold yet
    u64 answered[2];  // what the peer said it waits for when it was last given credit for it
};

struct Record {
    u64 seq;          // of the first message of the block
    u32 type;
    u32 size;         // bytes of each message
    u32 count;        // messages of the block
    u32 reserved;
    u64 offset;       // of the first byte in the output
};

enum { STATUS_DONE = 1, STATUS_BUDGET = 2, STATUS_TOO_LONG = 3, STATUS_CORRUPT = 4, STATUS_NO_ROOM = 5, STATUS_BAD_CREDIT = 6 };
enum { SMALL = 1, LONG = 3, PACKED = 4 };
static const u64 POSITION = 0x9e3779b97f4a7c15ull;
static const u64 MIX = 0xbb67ae8584caa73bull;
static const u64 VALUE_MASK = (1ull << 48) - 1;
static const u32 THREADS = 256; // most threads of a block

static __device__ __forceinline__ u64 mixed(u64 position, u64 word) {
    u64 t = (word ^ ((position + 1) * POSITION)) * MIX;
    return t ^ (t >> 32);
}

static __device__ __forceinline__ u32 folded(u64 sum) {
    u64 t = sum * MIX;
    return (u32)(t ^ (t >> 32));
}

// To memory that another party reads: whole words, each exactly once.
static __device__ __forceinline__ void store(u64 address, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

// All this thread has stored, and all it has seen by a barrier of its block, goes before this.
static __device__ __forceinline__ void publish(u64 address, u64 word) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

// From this GPU's own memory or from this host's: never from an aperture.
static __device__ __forceinline__ u64 look(u64 address) {
    u64 word;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

static __device__ __forceinline__ u64 load(u64 address) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

static __device__ __forceinline__ u64 sealed(u64 tag, u64 value) {
    return tag << 48 | (value & VALUE_MASK);
}

// The 64-bit counter nearest to `near` whose low 48 bits are `value`.
static __device__ __forceinline__ u64 widened(u64 value, u64 near) {
    long long delta = (long long)((value - near) << 16) >> 16;
    return near + (u64)delta;
}

static __device__ __forceinline__ u64 identity(u64 key, u64 seq) {
    return (key & 0xffff00000000ull) | (u32)((u32)seq + (u32)key);
}

// Word `index` of `bytes` bytes at `from` (aligned to 8), filled with zeros behind the end.
static __device__ __forceinline__ u64 word_of(const u8 *from, u64 bytes, u64 index) {
    u64 at = index * 8;
    if (at + 8 <= bytes) {
        return *(const u64 *)(from + at);
    }
    u64 word = 0;
    for (u64 i = at; i < bytes; i++) {
        word |= (u64)from[i] << ((i - at) * 8);
    }
    return word;
}

// Sum of one value of each thread; the result is thread 0's.
static __device__ u64 summed(u64 part) {
    __shared__ u64 parts[THREADS];
    __syncthreads();
    parts[threadIdx.x] = part;
    __syncthreads();
    u64 sum = 0;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < blockDim.x; i++) {
            sum += parts[i];
        }
    }
    return sum;
}

// Waits until `lines` are free. Thread 0 only. Returns STATUS_DONE or why not.
static __device__ u64 reserve(Sender *s, u64 lines, u64 budget) {
    u64 asked = ~0ull;
    for (;;) {
        if (s->mask + 1 - (s->head - s->credit) >= lines) {
            return STATUS_DONE;
        }
        u64 word = look(s->credit_line);
        if (word >> 48 == s->in_tag) {
            u64 credit = widened(word & VALUE_MASK, s->credit);
            if (credit - s->credit > s->head - s->credit) {
                return STATUS_BAD_CREDIT;
            }
            s->credit = credit;
            if (s->mask + 1 - (s->head - s->credit) >= lines) {
                return STATUS_DONE;
            }
        }
        u64 want = s->head + lines - (s->mask + 1);
        u64 step = (s->mask + 1) / 4 + 1; // lines after which a credit comes by itself
        if (asked != want && (want - s->credit > step || s->head - s->credit < step)) {
            asked = want;
            s->attempt += 1;
            store(s->starved_line + 8, sealed(s->out_key >> 32, s->attempt));
            publish(s->starved_line, sealed(s->out_key >> 32, want));
        }
        if (budget == 0) {
            return STATUS_BUDGET;
        }
        budget -= 1;
    }
}

// Sends one block: a message, or `count` messages of `size` bytes packed. All threads. Returns the status to all.
static __device__ u64 send(Sender *s, const u8 *from, u32 size, u32 count, u32 type, u32 kind, u64 budget) {
    __shared__ u64 status;
    u64 bytes = (u64)size * count;
    u64 own = kind == SMALL ? 48 : 40;
    u64 extra = bytes <= own ? 0 : (bytes + 63) / 64;
    if (threadIdx.x == 0) {
        status = extra > s->mask ? STATUS_TOO_LONG : reserve(s, 1 + extra, budget);
    }
    __syncthreads();
    if (status != STATUS_DONE) {
        return status;
    }
    u64 part = 0;
    for (u64 i = threadIdx.x; i < extra * 8; i += blockDim.x) {
        u64 word = word_of(from, bytes, i);
        u64 line = (s->head + 1 + i / 8) & s->mask;
        store(s->ring + line * 64 + (i & 7) * 8, word);
        if (i * 8 < bytes) {
            part += mixed(8 + i, word);
        }
    }
    u64 sum = summed(part);
    if (threadIdx.x == 0) {
        u64 line = s->ring + (s->head & s->mask) * 64;
        u64 mark = identity(s->out_key, s->seq) | (u64)kind << 48 | (kind == SMALL ? bytes << 56 : 0);
        sum += mixed(6, type) + mixed(7, mark);
        for (u32 i = 0; i < 6; i++) {
            u64 word;
            if (kind == SMALL) {
                word = word_of(from, bytes, i);
            } else if (i == 0) {
                word = (u64)size | (u64)count << 32;
            } else {
                word = extra == 0 ? word_of(from, bytes, i - 1) : 0;
            }
            store(line + i * 8, word);
            sum += mixed(i, word);
        }
        store(line + 48, (u64)type | (u64)folded(sum) << 32);
        publish(line + 56, mark);
        s->head += 1 + extra;
        s->seq += count;
    }
    __syncthreads();
    return STATUS_DONE;
}

// Sends `count` messages of `size` bytes, the next one `stride` bytes (a multiple of 8) behind the one before.
extern "C" __global__ void ntb_send(Sender *s, const u8 *from, u32 size, u64 stride, u32 count, u32 type, u64 budget) {
    u64 status = STATUS_DONE;
    u32 sent = 0;
    while (sent < count) {
        status = send(s, from + sent * stride, size, 1, type, size <= 48 ? SMALL : LONG, budget);
        if (status != STATUS_DONE) {
            break;
        }
        sent += 1;
    }
    if (threadIdx.x == 0) {
        s->sent = sent;
        s->status = status;
    }
}

// Sends `count` messages of `size` bytes that lie back to back, as one packed block.
extern "C" __global__ void ntb_send_packed(Sender *s, const u8 *from, u32 size, u32 count, u32 type, u64 budget) {
    u64 status = send(s, from, size, count, type, PACKED, budget);
    if (threadIdx.x == 0) {
        s->sent = status == STATUS_DONE ? count : 0;
        s->status = status;
    }
}

static __device__ void give_back(Receiver *r) {
    u64 line = r->credit_line;
    store(line + 8, sealed(r->out_tag, r->seq));
    publish(line, sealed(r->out_tag, r->tail)); // the lines credited have been read: see the barrier before
    r->credited = r->tail;
}

static __device__ void give_back_if_due(Receiver *r) {
    u64 word = look(r->starved_line);
    u64 attempt = load(r->starved_line + 8);
    int news = word != r->answered[0] || attempt != r->answered[1];
    int wanted = news && word >> 48 == r->in_key >> 32 && (long long)(r->tail - widened(word & VALUE_MASK, r->tail)) >= 0;
    if (r->tail - r->credited >= (r->mask + 1) / 4 + 1 || wanted) {
        give_back(r);
    }
    if (wanted) {
        r->answered[0] = word;
        r->answered[1] = attempt;
    }
}

// Receives up to `most` blocks into `out`, each at a multiple of 64 bytes, and describes them in `records`.
extern "C" __global__ void ntb_receive(Receiver *r, u8 *out, u64 room, Record *records, u32 most, u64 budget) {
    __shared__ u64 words[8];
    __shared__ u64 verdict;
    __shared__ u64 extra;
    __shared__ u64 bytes;
    u64 used = 0;
    u32 got = 0;
    u64 status = STATUS_DONE;
    u64 doubts = 0;
    while (got < most) {
        u64 line = r->ring + (r->tail & r->mask) * 64;
        if (threadIdx.x == 0) {
            verdict = STATUS_BUDGET;
            u64 due = identity(r->in_key, r->seq);
            u64 mark = 0;
            for (;;) {
                mark = look(line + 56);
                if ((mark & VALUE_MASK) == due) {
                    verdict = STATUS_DONE;
                    break;
                }
                if (budget == 0) {
                    break;
                }
                budget -= 1;
                give_back_if_due(r);
            }
            if (verdict == STATUS_DONE) {
                for (u32 i = 0; i < 7; i++) {
                    words[i] = load(line + i * 8);
                }
                words[7] = mark;
                u32 kind = (u32)(mark >> 48) & 0xff;
                u64 size = kind == SMALL ? mark >> 56 : words[0] & 0xffffffffull;
                u64 count = kind == SMALL ? 1 : words[0] >> 32;
                bytes = size * count;
                u64 own = kind == SMALL ? 48 : 40;
                extra = bytes <= own ? 0 : (bytes + 63) / 64;
                int sound = kind == SMALL ? size <= 48
                                          : (mark >> 56) == 0 && extra <= r->mask &&
                                                (kind == LONG ? count == 1 : kind == PACKED && count >= 1 && size >= 1);
                // The product of two 32-bit numbers does not wrap; `extra` bounds it before anything is copied.
                if (!sound) {
                    verdict = STATUS_CORRUPT;
                } else if (((bytes + 63) & ~63ull) > room - used) {
                    verdict = STATUS_NO_ROOM;
                }
            }
        }
        __syncthreads();
        status = verdict;
        u64 n = status == STATUS_DONE ? extra * 8 : 0;
        u64 part = 0;
        for (u64 i = threadIdx.x; i < n; i += blockDim.x) {
            u64 at = (r->tail + 1 + i / 8) & r->mask;
            u64 word = load(r->ring + at * 64 + (i & 7) * 8);
            *(u64 *)(out + used + i * 8) = word;
            if (i * 8 < bytes) {
                // What a producer fills a word up with is zero: masked, so that the check is over the message.
                u64 left = bytes - i * 8;
                part += mixed(8 + i, left >= 8 ? word : word & ((1ull << (left * 8)) - 1));
            }
        }
        u64 sum = summed(part);
        if (threadIdx.x == 0 && (status == STATUS_DONE || status == STATUS_CORRUPT)) {
            sum += mixed(6, words[6] & 0xffffffffull) + mixed(7, words[7]);
            for (u32 i = 0; i < 6; i++) {
                sum += mixed(i, words[i]);
            }
            int holds = folded(sum) == (u32)(words[6] >> 32) && status == STATUS_DONE;
            if (!holds) {
                // Still arriving, for as long as the budget lasts; corrupt then.
                r->incomplete += 1;
                verdict = budget == 0 ? STATUS_CORRUPT : 0;
                budget -= budget > 0;
            } else {
                u32 kind = (u32)(words[7] >> 48) & 0xff;
                u32 size = kind == SMALL ? (u32)(words[7] >> 56) : (u32)words[0];
                u32 count = kind == SMALL ? 1 : (u32)(words[0] >> 32);
                if (extra == 0) {
                    for (u32 i = 0; i * 8 < bytes; i++) {
                        *(u64 *)(out + used + i * 8) = kind == SMALL ? words[i] : words[i + 1];
                    }
                }
                records[got].seq = r->seq;
                records[got].type = (u32)words[6];
                records[got].size = size;
                records[got].count = count;
                records[got].reserved = 0;
                records[got].offset = used;
                r->tail += 1 + extra;
                r->seq += count;
                give_back_if_due(r);
                verdict = STATUS_DONE;
            }
        }
        __syncthreads();
        status = verdict;
        if (status == 0) {
            doubts += 1;
            __syncthreads();
            continue;
        }
        if (status != STATUS_DONE) {
            break;
        }
        used += (bytes + 63) & ~63ull;
        got += 1;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        r->got = got;
        r->status = status;
    }
}

// Gives everything consumed back, if anything.
extern "C" __global__ void ntb_give_back(Receiver *r) {
    if (threadIdx.x == 0 && r->tail != r->credited) {
        give_back(r);
    }
}

// Copies `rows` rows of `words` 8-byte words into the peer's memory, then stores `flag`: whoever sees the flag finds the tile.
extern "C" __global__ void ntb_tile(u64 to, u64 to_pitch, u64 from, u64 from_pitch, u32 rows, u32 words, u64 flag_at,
                                    u64 flag) {
    u64 all = (u64)rows * words;
    for (u64 i = threadIdx.x; i < all; i += blockDim.x) {
        u64 row = i / words;
        u64 at = (i - row * words) * 8;
        store(to + row * to_pitch + at, *(const u64 *)(from + row * from_pitch + at));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        publish(flag_at, flag);
    }
}

// One step of an all-reduce over a ring of GPUs. Waits until `flag_in`, in this GPU's memory, has reached `due`; adds what the
// one before has stored at `incoming` to `own`; stores the sums into the next one's memory at `next` (nowhere when 0), and
// `due + 1` at `flag_out`. With `add` 0 the incoming numbers replace the own ones: the second round, which hands the sums on.
extern "C" __global__ void ntb_reduce_step(float *own, u64 incoming, u64 next, u32 count, u64 flag_in, u64 due, u64 flag_out,
                                           u32 add, u64 budget, u64 *status) {
    __shared__ u32 ready;
    if (threadIdx.x == 0) {
        ready = 0;
        for (;;) {
            if ((long long)(look(flag_in) - due) >= 0) {
                ready = 1;
                break;
            }
            if (budget == 0) {
                break;
            }
            budget -= 1;
        }
    }
    __syncthreads();
    if (!ready) {
        if (threadIdx.x == 0) {
            *status = STATUS_BUDGET;
        }
        return;
    }
    // Two numbers a word, so that stores are as wide as everywhere else; an odd count has one number alone at the end.
    for (u32 i = threadIdx.x; i < (count + 1) / 2; i += blockDim.x) {
        u64 word = load(incoming + (u64)i * 8);
        float a = __uint_as_float((u32)word);
        float b = __uint_as_float((u32)(word >> 32));
        bool two = i * 2 + 1 < count;
        if (add) {
            a = __fadd_rn(own[i * 2], a);
            b = two ? __fadd_rn(own[i * 2 + 1], b) : 0.0f;
        }
        own[i * 2] = a;
        if (two) {
            own[i * 2 + 1] = b;
        }
        if (next != 0) {
            store(next + (u64)i * 8, (u64)__float_as_uint(a) | (u64)(two ? __float_as_uint(b) : 0) << 32);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (next != 0) {
            publish(flag_out, due + 1);
        }
        *status = STATUS_DONE;
    }
}

// Answers: waits for word `i` (from 1 on) at `ping` and stores it at `pong`, `count` times, with no host in between. The time in
// nanoseconds of each wait goes to `spent`, when that is not 0.
extern "C" __global__ void ntb_echo(u64 ping, u64 pong, u64 count, u64 budget, u64 spent, u64 *done) {
    if (threadIdx.x != 0) {
        return;
    }
    u64 i = 1;
    for (; i <= count; i++) {
        u64 begin;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
        while (look(ping) != i && budget != 0) {
            budget -= 1;
        }
        if (budget == 0) {
            break;
        }
        publish(pong, i);
        if (spent != 0) {
            u64 end;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
            *(u64 *)(spent + (i - 1) * 8) = end - begin;
        }
    }
    *done = i - 1;
}

// Asks: stores word `i` at `ping`, waits for it at `pong`.
extern "C" __global__ void ntb_ask(u64 ping, u64 pong, u64 count, u64 budget, u64 spent, u64 *done) {
    if (threadIdx.x != 0) {
        return;
    }
    u64 i = 1;
    for (; i <= count; i++) {
        u64 begin;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
        publish(ping, i);
        while (look(pong) != i && budget != 0) {
            budget -= 1;
        }
        if (budget == 0) {
            break;
        }
        if (spent != 0) {
            u64 end;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
            *(u64 *)(spent + (i - 1) * 8) = end - begin;
        }
    }
    *done = i - 1;
}
