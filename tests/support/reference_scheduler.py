"""An independent model of SGLang 0.5.23's scheduler: plain, token by token, one iteration at a time.

It reproduces real schedulers' traces (13,553 batches) and serves as the oracle for configurations that no trace
covers. It works on tuples of token ids and shares no code with `sim`. Time is outside:
`Engine.step(arrivals)` is one iteration -> (batch, finished).
"""

import heapq
from itertools import count

CLIP, RETRACT_STEPS = 4096, 20  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, SGLANG_RETRACT_DECODE_STEPS


class Node:
    def __init__(s, tree, parent, key):
        s.t, s.parent, s.key, s.kids, s.lock = next(tree.clock), parent, key, {}, 0


class Tree:  # page-granular radix tree; t = last access, larger is newer
    def __init__(s, page):
        s.page, s.clock, s.evictable = page, count(1), 0
        s.root = Node(s, None, ())

    def down(s, key, stamp):  # walk; a partly covered node is split, its suffix stamped as fresh
        key = key[: len(key) // s.page * s.page]
        node, i = s.root, 0
        while i < len(key) and (kid := node.kids.get(key[i : i + s.page])):
            if stamp:
                kid.t = next(s.clock)  # insert stamps each node on the way down
            n = (
                next(
                    (j for j, (x, y) in enumerate(zip(kid.key, key[i:], strict=False)) if x != y),
                    min(len(kid.key), len(key) - i),
                )
                // s.page
                * s.page
            )
            if n < len(kid.key):
                p = Node(s, kid.parent, kid.key[:n])
                p.lock = kid.lock
                kid.parent.kids[p.key[: s.page]] = p
                kid.parent, kid.key, kid.t = p, kid.key[n:], next(s.clock)
                p.kids[kid.key[: s.page]] = kid
                node = p
                i += n
                break
            node = kid
            i += n
        return key, node, i

    def match(s, key):
        key, node, i = s.down(key, False)
        t, x = float(next(s.clock)), node
        while key and x:
            x.t = t
            t -= 1e-5
            x = x.parent  # the deepest matched node is the newest
        return i, node

    def insert(s, key):
        key, node, i = s.down(key, True)
        if i < len(key):
            leaf = Node(s, node, key[i:])
            node.kids[leaf.key[: s.page]] = leaf
            s.evictable += len(leaf.key)
            return i, leaf
        return i, node  # i = what was already there

    def pin(s, node, d):
        while node is not s.root:
            if node.lock == (0 if d > 0 else 1):
                s.evictable -= d * len(node.key)
            node.lock += d
            node = node.parent

    def evict(s, eng, target):  # whole unlocked leaves, oldest first, until available >= target
        heap, n, todo = [], count(), [s.root]
        while todo:
            x = todo.pop()
            todo += x.kids.values()
            if x is not s.root and not x.kids and not x.lock:
                heapq.heappush(heap, (x.t, next(n), x))
        while heap and eng.avail < target:
            x = heapq.heappop(heap)[2]
            p = x.parent
            del p.kids[x.key[: s.page]]
            s.evictable -= len(x.key)
            eng.avail += len(x.key)
            if p is not s.root and not p.kids and not p.lock:
                heapq.heappush(heap, (p.t, next(n), p))


class Req:  # true = the tokens it will emit (last one ends it: stop token or length)
    def __init__(s, rid, prompt, true, max_new, ignore_eos=True, logprob_start=-1):
        s.rid, s.prompt, s.true, s.max_new, s.ignore_eos, s.lps = (
            rid,
            tuple(prompt),
            list(true),
            max_new,
            ignore_eos,
            logprob_start,
        )
        s.out, s.prefix, s.end, s.kv, s.owned_by_tree, s.lock, s.mid, s.cached, s.seen = [], 0, 0, 0, 0, None, 0, 0, 0
        s.done = s.retracted = s.stain = False

    def ids(s):
        return s.prompt + tuple(s.out)

    def cap(s):
        n = len(s.prompt) + len(s.out) - 1
        return n if s.lps < 0 else min(n, s.lps)


class Engine:
    def __init__(
        s,
        pool,
        max_run,
        chunk=4096,
        max_prefill=16384,
        page=1,
        policy="fcfs",
        overlap=True,
        conserv=1.0,
        ctx=2048,
        decay=600,
        passes=1,
    ):
        s.page, s.pool, s.avail, s.max_run, s.rows, s.chunk, s.max_prefill = (
            page,
            pool,
            pool // page * page,
            max_run,
            max_run,
            chunk,
            max_prefill,
        )
        s.policy, s.overlap, s.max_len, s.passes, s.tree = policy, overlap, min(ctx, pool) - 1, passes, Tree(page)
        s.waiting, s.running, s.last, s.queue, s.full, s.chunked = [], [], None, [], False, None
        s.r0 = s.ratio = min(0.7 * conserv, 1.0)
        s.rmin = s.r0 * 0.14
        s.dec = (s.r0 - s.rmin) / decay

    def up(s, n):
        return -(-n // s.page) * s.page

    def need(s, tokens):
        s.avail >= tokens or s.tree.evict(s, tokens)

    def checkpoint(s, r, upto):  # publish r's first `upto` tokens and move its lock to the end node
        n = upto // s.page * s.page
        p = len(r.prompt) // s.page * s.page
        if not n:
            return
        have, node = s.tree.insert(r.ids()[:n])
        s.avail += max(0, have - r.owned_by_tree)  # duplicates are freed
        if 0 < p < n:
            s.tree.insert(r.ids()[:p])  # split at the prompt end, so outputs can be evicted first
        if r.lock:
            s.tree.pin(r.lock, -1)
        s.tree.pin(node, 1)
        r.lock, r.owned_by_tree = node, n

    def release(s, r, publish):
        if publish:
            s.checkpoint(r, min(r.kv, len(r.prompt) + len(r.out)))
        s.avail += s.up(r.kv) - r.owned_by_tree
        s.tree.pin(r.lock or s.tree.root, -1)
        r.lock = None
        s.rows += 1

    def order(s):
        if s.policy == "lpm" and len(s.waiting) <= 128:
            seen, late = Tree(1), set()
            for r in s.waiting:
                m, _ = s.tree.match(r.ids())
                r.hit = min(m, r.cap())
                if m <= 32:
                    if seen.match(r.ids())[0] >= 32:
                        late.add(r)
                    else:
                        seen.insert(r.ids())
            s.waiting.sort(key=lambda r: float("inf") if r in late else -r.hit)
        elif s.waiting:  # fcfs only refreshes recency: 1 pass in 32, first 128, head last
            for r in reversed(s.waiting[:128] if s.passes % 32 == 0 else []):
                s.tree.match(r.ids())
            s.passes += 1

    def prefill(s):
        s.full = s.full and bool(s.running)
        if (s.full or not s.waiting) and not s.chunked:
            return None
        if min(s.max_run - len(s.running), s.rows) <= 0 and not s.chunked:
            s.full = True
            return None
        s.order()
        batch, cut = [], None
        tot, cur, inp, chk = (
            sum(min(r.max_new - len(r.out), CLIP) * (1.0 if r.ignore_eos else s.ratio) for r in s.running),
            0,
            s.max_prefill,
            s.chunk,
        )

        def room(used):
            return s.avail + s.tree.evictable - used

        def take(r, n, new):
            nonlocal tot, cur, inp, chk
            batch.append(r)
            r.end = r.prefix + n
            e = s.up(n)
            tot += e + s.page + new
            cur += e + s.page
            inp -= e
            chk = chk if chk is None else chk - e

        if r := s.chunked:  # the unfinished prompt always goes first
            lim = min(chk, int(room(tot)))
            lim = lim if lim > 0 else chk
            want = len(r.ids()) - r.prefix
            take(r, min(want, lim), 0 if want > lim else min(r.max_new, CLIP))
            s.chunked = r if want > lim else None

        def spent():
            return inp <= 0 or (chk is not None and chk <= 0)

        for r in s.waiting:
            if spent() and room(tot) > 0 and room(cur) > 0:
                break
            if s.full or len(batch) >= min(s.max_run - len(s.running), s.rows + sum(x.kv > 0 for x in batch)):
                s.full = True
                break
            r.prefix, node = s.tree.match(r.ids()[: r.cap()])
            r.owned_by_tree = r.prefix
            n = len(r.ids()) - r.prefix
            s.tree.pin(node, 1)
            new, verdict = min(r.max_new, CLIP), "take"
            if n + min(max(r.max_new - len(r.out), 0), CLIP) + s.page >= room(tot):
                verdict = "no memory"
            elif chk is None and batch and s.up(n) >= inp:
                verdict = "stop"
            elif chk is not None and s.up(n) > chk:
                n = (r.prefix + chk // s.page * s.page) // s.page * s.page - r.prefix
                new = 0
                verdict, cut = ("stop", cut) if n <= 0 else ("take", r)
            if verdict == "take":
                take(r, n, new)
                r.lock = node
            else:
                s.tree.pin(node, -1)
            if verdict == "no memory" or (verdict == "take" and (room(tot) <= 0 or room(cur) <= 0)):
                s.full = bool(batch or s.running)
                break
            if verdict == "stop" or spent():
                break
        if not batch:
            return None
        s.waiting = [r for r in s.waiting if r not in batch]
        s.chunked = cut or s.chunked
        if s.chunked:
            s.chunked.mid += 1
        s.need(sum(r.end - r.prefix for r in batch) + (len(batch) * s.page if s.page > 1 else 0))
        for r in batch:
            s.rows -= r.kv == 0
            s.avail -= s.up(r.end) - s.up(r.prefix)
            r.kv, r.retracted = r.end, False
            if not r.stain:
                r.cached += r.prefix - r.seen
                r.seen = r.end
        return dict(
            mode="EXTEND", reqs=batch, chunked=s.chunked, log=[[r.rid, r.prefix, r.end - r.prefix] for r in batch]
        )

    def fits(s, reqs):
        n = sum(r.kv % s.page == 0 for r in reqs) * s.page
        s.need(n)
        return s.avail >= n

    def decode(s):
        n0, flying = len(s.running), s.queue[0]["reqs"] if s.overlap and s.queue else []
        ending = [r for r in s.running if r in flying and len(r.out) + 1 >= r.max_new]  # their last token is in flight
        s.running = [r for r in s.running if r not in ending]
        if not s.running or (not (ok := s.fits(s.running)) and ending):
            s.full = False
            return None  # wait a step for their memory
        if ok:
            s.ratio = max(s.ratio - s.dec, s.rmin)
        else:
            keep, gone = sorted(s.running, key=lambda r: (len(r.out), -len(r.prompt)), reverse=True), []
            while len(keep) > 1 and (not gone or not s.fits(keep)):
                r = keep.pop()
                s.release(r, False)
                s.need(len(keep) * RETRACT_STEPS)
                gone.append(r)
                r.retracted = r.stain = True
                r.prefix = r.owned_by_tree = r.kv = r.mid = 0
            s.running = keep
            s.waiting = s.waiting + gone  # (a last one that still does not fit is aborted)
            s.ratio = min(
                1.0, (sum(len(r.out) for r in keep) + RETRACT_STEPS * len(keep)) / (sum(r.max_new for r in keep) + 1)
            )
        s.full = s.full and len(s.running) == n0
        s.need(len(s.running) * s.page)
        for r in s.running:
            s.avail -= s.page * (r.kv % s.page == 0)
            r.kv += 1
        return dict(
            mode="DECODE", reqs=list(s.running), chunked=None, log=[[r.rid, r.kv, len(r.out)] for r in s.running]
        )

    def process(s, b):
        fin = []
        for r in b["reqs"]:
            if r.retracted or (r.done and r.mid <= 0):
                continue  # overshoot or dropped token
            if r.mid > 0:
                r.mid -= 1
                continue  # middle chunk
            r.out.append(r.true[len(r.out)])
            r.done = len(r.out) >= len(r.true)
            if r.done:
                s.release(r, True)
                fin.append(r)
            elif b["mode"] == "EXTEND":
                s.checkpoint(r, r.end)
                r.prefix = r.end
        return fin

    def step(s, arrivals=()):  # one scheduler iteration -> (batch launched, requests finished)
        for r in arrivals:
            r.max_new = max(0, min(r.max_new, s.max_len - len(r.prompt) - 1, s.pool - s.up(len(r.prompt)) - s.page - 1))
            s.waiting = [*s.waiting, r]
        if (r := s.chunked) and r.end > r.prefix:
            s.checkpoint(r, r.end)
            r.prefix = r.end
        if s.last and s.last["mode"] == "EXTEND":
            join = [r for r in s.last["reqs"] if not r.done and r is not s.chunked and r is not s.last["chunked"]]
            if len(join) < len(s.last["reqs"]) or (join and not s.running):
                s.full = False
            s.running = s.running + join
        if any(r.done for r in s.running):
            s.running, s.full = [r for r in s.running if not r.done], False
        b = s.prefill() or (s.decode() if s.running else None)
        if not b and not (s.last and s.overlap) and not s.waiting:
            s.ratio = s.r0
        if b:
            s.queue.append(b)
        fin = s.process(s.queue.pop(0)) if (b if not s.overlap else s.last) else []
        s.last = b
        return b, fin
