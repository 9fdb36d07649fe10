//! Checks contract 12: gets.

use peerlane_hal::{Error, ErrorKind, Region};

use crate::data::{POISON, aligned, lengths, pattern, seed, with_guards};
use crate::engine::{OpOf, get, put, signal, wait};
use crate::failure::{Failure, Outcome, ensure, ensure_bytes};
use crate::harness::Harness;
use crate::ranks::{Participant, QUIET, on_each, on_ranks, read};

/// Gets spans from a peer and from the own rank: empty, one byte, odd lengths, lengths around the
/// largest piece, then all small offsets. Every byte around the destination is checked.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_get_copies_exactly_its_bytes<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], of_any_length)?;
    on_ranks(harness, 2, at_any_offset)
}

fn of_any_length<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let lengths = lengths(&me.caps);
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let guard = aligned(&me.caps, 64);
    let (source, landing) = (me.bytes(longest)?, me.bytes(longest + 2 * guard)?);
    let mut engine = me.engine()?;
    let from = me.rank_after(1);
    for (round, bytes) in (1..).zip(lengths) {
        me.write(&source.local, 0, &pattern(seed(me.me, round), longest));
        me.barrier()?;
        engine.run(&[get((&landing.local, guard), (&source.remote[from], 0), bytes)])?;
        let expected = with_guards(&pattern(seed(from, round), bytes), guard, longest + 2 * guard);
        me.ensure_bytes(&format!("a get of {bytes} bytes"), &landing.local, 0, &expected)?;
        me.poison(&landing.local, guard..guard + bytes);
        me.barrier()?;
    }
    // An empty span at the end of a region is valid.
    let (end, source_end) = (longest + 2 * guard, longest);
    engine.run(&[get((&landing.local, end), (&source.remote[from], source_end), 0)])?;
    me.barrier()
}

fn at_any_offset<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let caps = me.caps;
    let align = caps.put_align_bytes;
    let region = aligned(&caps, 600) + 32 * align;
    let (source, landing) = (me.bytes(region)?, me.bytes(region)?);
    let from_rank = me.rank_after(1);
    me.write(&source.local, 0, &pattern(seed(me.me, 0), region));
    me.barrier()?;
    let sent = pattern(seed(from_rank, 0), region);
    let mut engine = me.engine()?;
    let lengths = [1, 7, 8, 65, 257].map(|bytes| aligned(&caps, bytes));
    let offsets = [0, 1, 3, 8, 9, 16, 31].map(|steps| steps * align);
    for bytes in lengths {
        for (to, from) in offsets.iter().flat_map(|to| offsets.map(|from| (*to, from))) {
            engine.run(&[get((&landing.local, to), (&source.remote[from_rank], from), bytes)])?;
            let seen = me.read(&landing.local, 0, region);
            let span = |from: u64| from as usize..(from + bytes) as usize;
            let mut expected = vec![POISON; seen.len()];
            expected[span(to)].copy_from_slice(&sent[span(from)]);
            let what = format!("{bytes} bytes from offset {from} to offset {to}");
            ensure_bytes(what, &seen, &expected)?;
            me.poison(&landing.local, to..to + bytes);
        }
    }
    me.barrier()
}

/// Puts blocks to one place of the next rank and gets each back from there, all submitted ahead.
/// Each get must see the block put last before it.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn gets_and_puts_with_one_peer_take_effect_in_submission_order<H: Harness>(
    harness: &H,
) -> Outcome {
    const BLOCKS: u64 = 24;
    on_each(harness, 1..=3, |me| {
        let block = aligned(&me.caps, 30_000);
        let (source, landing) = (me.bytes(BLOCKS * block)?, me.bytes(BLOCKS * block)?);
        // The previous rank writes and reads the scratch, and sends here what it has read.
        let (scratch, returned) = (me.bytes(block)?, me.bytes(BLOCKS * block)?);
        let flags = me.flags(1)?;

        let sent = pattern(seed(me.me, 0), BLOCKS * block);
        me.write(&source.local, 0, &sent);
        me.barrier()?;

        let mut engine = me.engine()?;
        let next = me.rank_after(1);
        let (there, back) = (&scratch.remote[next], &returned.remote[next]);
        let mut ops: Vec<OpOf<'_, H>> = (0..BLOCKS)
            .map(|number| number * block)
            .flat_map(|at| {
                let (there, landing) = ((there, 0), (&landing.local, at));
                [
                    put(there, (&source.local, at), block),
                    get(landing, there, block),
                    put((back, at), landing, block),
                ]
            })
            .collect();
        ops.push(signal(&flags.remote[next], 0, 1));
        engine.run(&ops)?;
        me.ensure_bytes("blocks that were put and got back", &landing.local, 0, &sent)?;

        // A completed ticket does not say what a peer has seen, so the previous rank's signal says it.
        engine.wait_for_flag(&flags.local, 0, 1)?;
        let sent = pattern(seed(me.rank_after(me.ranks - 1), 0), BLOCKS * block);
        let named = "blocks that a peer put, got back and sent from the destinations of its gets";
        me.ensure_bytes(named, &returned.local, 0, &sent)?;
        me.barrier()
    })
}

/// Lets the owner overwrite the source of a get as soon as it sees the flag.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_signal_to_a_peer_comes_after_the_gets_from_it<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 6;
    on_each(harness, [2, 3], |me| {
        let bytes = aligned(&me.caps, 300_000);
        // Rank 0 holds one slot for each reader.
        let source = me.bytes(bytes * me.ranks as u64)?;
        let landing = me.bytes(bytes)?;
        let flags = me.flags(me.ranks as u64)?;
        let mut engine = me.engine()?;
        for round in 1..=ROUNDS {
            let sent = |rank: usize| pattern(seed(rank, round), bytes);
            if me.me == 0 {
                for reader in 1..me.ranks {
                    me.write(&source.local, reader as u64 * bytes, &sent(reader));
                }
            }
            me.barrier()?;
            if me.me == 0 {
                for reader in 1..me.ranks as u64 {
                    engine.wait_for_flag(&flags.local, reader, round)?;
                    me.poison(&source.local, reader * bytes..(reader + 1) * bytes);
                }
            } else {
                let slot = me.me as u64;
                engine.run(&[
                    get((&landing.local, 0), (&source.remote[0], slot * bytes), bytes),
                    signal(&flags.remote[0], slot, round),
                ])?;
                let what = "bytes of a get before a signal, whose source was then overwritten";
                me.ensure_bytes(what, &landing.local, 0, &sent(me.me))?;
            }
            me.barrier()?;
        }
        Ok(())
    })
}

/// Watches the flag on another thread, which reads the bytes as soon as it sees the flag.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_signal_to_oneself_announces_the_gets_before_it<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 6;
    on_each(harness, 1..=3, |me| {
        let bytes = aligned(&me.caps, 300_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes * me.ranks as u64)?);
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        for round in 1..=ROUNDS {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            me.poison(&landing.local, 0..bytes * me.ranks as u64);
            me.barrier()?;
            let mut ops: Vec<OpOf<'_, H>> = (0..me.ranks)
                .map(|peer| {
                    let slot = (&landing.local, peer as u64 * bytes);
                    get(slot, (&source.remote[peer], 0), bytes)
                })
                .collect();
            ops.push(signal(&flags.remote[me.me], 0, round));
            std::thread::scope(|scope| {
                let (harness, time_limit) =
                    (me.harness, me.time_limit("the signal to the own rank"));
                let (flags, landing, ranks) = (&flags.local, &landing.local, me.ranks);
                let watcher = scope.spawn(move || {
                    while flags.flag_value(0).is_none_or(|seen| seen < round) {
                        time_limit.check(|| "the flag is not yet set".to_owned())?;
                        std::thread::yield_now();
                    }
                    // In reverse order: the last get had the least time.
                    (0..ranks).rev().try_for_each(|peer| {
                        let here = read(harness, landing, peer as u64 * bytes, bytes);
                        let what =
                            format!("bytes of rank {peer}, announced by a signal to the own rank");
                        ensure_bytes(what, &here, &pattern(seed(peer, round), bytes))
                    })
                });
                engine.run(&ops)?;
                watcher
                    .join()
                    .map_err(|_| Failure::new("the thread that watches the flag panicked"))?
            })?;
            me.barrier()?;
        }
        Ok(())
    })
}

/// Gets spans of many lengths and reads them, by the host and by another engine, as soon as the
/// ticket completes.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_completed_get_is_visible_here<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 3], |me| {
        let lengths = lengths(&me.caps);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let (source, landing, copy) = (me.bytes(longest)?, me.bytes(longest)?, me.bytes(longest)?);
        let flags = me.flags(1)?;
        let (mut engine, mut other) = (me.engine()?, me.engine()?);
        let from = me.rank_after(1);
        for (round, bytes) in (1..).zip(lengths) {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            me.barrier()?;
            let gate = engine.caps().queued_wait.then(|| wait(&flags.local, 0, round));
            let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
            ops.push(get((&landing.local, 0), (&source.remote[from], 0), bytes));
            let (mut ticket, rest) = engine.submit_held(&ops)?;
            // An engine may already report completion here; then the gate stays closed.
            if !rest.is_empty() || engine.completed()? < ticket {
                other.run(&[signal(&flags.remote[me.me], 0, round)])?;
                ticket = engine.submit_all(rest)?;
            }
            engine.finish(ticket)?;
            let sent = pattern(seed(from, round), bytes);
            me.ensure_bytes("destination of a completed get", &landing.local, 0, &sent)?;
            other.run(&[put((&copy.remote[me.me], 0), (&landing.local, 0), bytes)])?;
            me.ensure_bytes(
                "destination of a completed get, copied by another engine",
                &copy.local,
                0,
                &sent,
            )?;
            me.poison(&landing.local, 0..bytes);
            me.poison(&copy.local, 0..bytes);
            me.barrier()?;
        }
        Ok(())
    })
}

/// Gets from the own rank through an alias, from allocated and from registered memory, and behind a
/// put to the same place.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_get_from_oneself_is_a_local_copy<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let bytes = aligned(&me.caps, 70_001);
        let align = aligned(&me.caps, 1);
        let mut sources = vec![("allocated", me.allocate(bytes, peerlane_hal::Role::Data)?)];
        if let Some(memory) = me.own_memory(bytes + align) {
            let start = usize::try_from(align).expect("an alignment");
            let end = start + usize::try_from(bytes).expect("a few bytes");
            let role = peerlane_hal::Role::Data;
            sources.push(("registered", me.register(&*memory, start..end, role)?));
        }
        let (fresh, landing) = (me.bytes(bytes)?, me.bytes(2 * bytes)?);
        for (round, (name, source)) in (1..).zip(sources) {
            let source = me.share(source)?;
            let (first, second) = (
                pattern(seed(me.me, 2 * round), bytes),
                pattern(seed(me.me, 2 * round + 1), bytes),
            );
            me.write(&source.local, 0, &first);
            me.write(&fresh.local, 0, &second);
            let alias = (&source.remote[me.me], 0);
            me.engine()?.run(&[
                get((&landing.local, 0), alias, bytes),
                put(alias, (&fresh.local, 0), bytes),
                get((&landing.local, bytes), alias, bytes),
            ])?;
            let what = format!("a get from the own rank, {name} memory");
            me.ensure_bytes(&what, &landing.local, 0, &first)?;
            let what = format!("{what}, after a put");
            me.ensure_bytes(&what, &landing.local, bytes, &second)?;
            me.barrier()?;
        }
        Ok(())
    })
}

/// Queues a get behind a wait for a flag of the rank that it copies from. It must copy the bytes
/// that the rank's host and engine wrote before the signal.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_get_behind_a_wait_sees_what_the_wait_acquired<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 8;
    on_each(harness, [1, 2, 3], |me| {
        let bytes = aligned(&me.caps, 5000);
        // The host writes the first half, an engine the second.
        let (fresh, source, landing) =
            (me.bytes(bytes)?, me.bytes(2 * bytes)?, me.bytes(2 * bytes)?);
        let flags = me.flags(1)?;
        let (mut engine, mut writer) = (me.engine()?, me.engine()?);
        let (from, reader) = (me.rank_after(1), me.rank_after(me.ranks - 1));
        for round in 1..=ROUNDS {
            let sent = |rank: usize| pattern(seed(rank, round), 2 * bytes);
            me.poison(&source.local, 0..2 * bytes);
            me.poison(&landing.local, 0..2 * bytes);
            me.barrier()?;
            let ops = [
                wait(&flags.local, 0, round),
                get((&landing.local, 0), (&source.remote[from], 0), 2 * bytes),
            ];
            let (ticket, rest) = engine.submit_held(&ops)?;
            engine.watch(QUIET / 5, |done| {
                ensure!(done < ticket, "the get after the wait is complete before the flag is set");
                me.ensure_poison("bytes of the get after the wait", &landing.local, 0..2 * bytes)
            })?;
            me.barrier()?;
            let (own, half) = (sent(me.me), usize::try_from(bytes).expect("a few bytes"));
            me.write(&source.local, 0, &own[..half]);
            me.write(&fresh.local, 0, &own[half..]);
            writer.run(&[put((&source.remote[me.me], bytes), (&fresh.local, 0), bytes)])?;
            writer.run(&[signal(&flags.remote[reader], 0, round)])?;
            engine.run(rest)?;
            let last = engine.submit(&[])?;
            engine.finish(last)?;
            me.ensure_bytes("bytes of a get after a wait", &landing.local, 0, &sent(from))?;
            me.barrier()?;
        }
        Ok(())
    })
}

/// Submits gets whose destination or source leaves its region or breaks the alignment, alone and
/// behind a valid op. The engine must go on afterwards.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_get_outside_its_regions_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let (align, bytes) = (caps.put_align_bytes, aligned(&caps, 256));
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let mut engine = me.engine()?;
        let (to, from) = (|at| (&landing.local, at), |at| (&source.remote[0], at));
        let far = u64::MAX / align * align;
        let mut invalid: Vec<(&str, OpOf<'_, H>)> = vec![
            ("a destination that ends after the region", get(to(align), from(0), bytes)),
            ("a source that ends after the region", get(to(0), from(align), bytes)),
            ("a destination after the region", get(to(bytes + align), from(0), 0)),
            ("a source after the region", get(to(0), from(bytes + align), 0)),
            ("a destination whose end overflows", get(to(far), from(0), align)),
            ("a source whose end overflows", get(to(0), from(far), align)),
            ("more bytes than an address space has", get(to(0), from(0), far)),
        ];
        if align > 1 {
            invalid.extend([
                ("a misaligned destination", get(to(1), from(0), align)),
                ("a misaligned source", get(to(0), from(1), align)),
                ("a misaligned length", get(to(0), from(0), 1)),
            ]);
        }
        let valid = get(to(0), from(0), bytes);
        for (what, op) in invalid {
            for ops in [&[op][..], &[valid, op]] {
                if ops.len() <= caps.slice_ops_max {
                    match engine.try_submit(ops) {
                        Ok(ticket) => ensure!(
                            false,
                            "{what}: submit returned ticket {}, expected InvalidArgument",
                            ticket.0
                        ),
                        Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                        Err(error) => Err(Failure::from(error)
                            .within(format!("{what}: expected an error of kind InvalidArgument")))?,
                    }
                }
            }
        }
        engine.run(&[])?;
        me.ensure_poison(
            "destination of refused slices",
            &landing.local,
            0..landing.local.bytes(),
        )?;
        me.write(&source.local, 0, &pattern(seed(0, 0), bytes));
        engine.run(&[valid])?;
        me.ensure_bytes(
            "a get after refused slices",
            &landing.local,
            0,
            &pattern(seed(0, 0), bytes),
        )
    })
}
