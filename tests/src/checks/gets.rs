//! Contract 12: gets.

use peerlane_hal::{Error, ErrorKind, Region};

use crate::data::{POISON, aligned, lengths, pattern, seed, surrounded};
use crate::driver::{OpOf, get, put, signal, wait};
use crate::failure::{Failure, Outcome, ensure, ensure_bytes};
use crate::harness::Harness;
use crate::world::{Participant, QUIET, on_each, on_ranks, read};

/// From a peer and from oneself: nothing, a byte, odd lengths, those around the largest piece; then
/// all small offsets. Everything around the bytes is looked at.
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
    let mut driver = me.engine()?;
    let from = me.after(1);
    for (round, bytes) in (1..).zip(lengths) {
        me.write(&source.local, 0, &pattern(seed(me.me, round), longest));
        me.meet()?;
        driver.run(&[get((&landing.local, guard), (&source.remote[from], 0), bytes)])?;
        let wanted = surrounded(&pattern(seed(from, round), bytes), guard, longest + 2 * guard);
        me.ensure_bytes(&format!("a get of {bytes} bytes"), &landing.local, 0, &wanted)?;
        me.poison(&landing.local, guard..guard + bytes);
        me.meet()?;
    }
    // Behind the last byte there is still room for no bytes.
    let (end, source_end) = (longest + 2 * guard, longest);
    driver.run(&[get((&landing.local, end), (&source.remote[from], source_end), 0)])?;
    me.meet()
}

fn at_any_offset<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let caps = me.caps;
    let align = caps.put_align_bytes;
    let region = aligned(&caps, 600) + 32 * align;
    let (source, landing) = (me.bytes(region)?, me.bytes(region)?);
    let from_rank = me.after(1);
    me.write(&source.local, 0, &pattern(seed(me.me, 0), region));
    me.meet()?;
    let sent = pattern(seed(from_rank, 0), region);
    let mut driver = me.engine()?;
    let lengths = [1, 7, 8, 65, 257].map(|bytes| aligned(&caps, bytes));
    let offsets = [0, 1, 3, 8, 9, 16, 31].map(|steps| steps * align);
    for bytes in lengths {
        for (to, from) in offsets.iter().flat_map(|to| offsets.map(|from| (*to, from))) {
            driver.run(&[get((&landing.local, to), (&source.remote[from_rank], from), bytes)])?;
            let seen = me.read(&landing.local, 0, region);
            let span = |from: u64| from as usize..(from + bytes) as usize;
            let mut wanted = vec![POISON; seen.len()];
            wanted[span(to)].copy_from_slice(&sent[span(from)]);
            let what = format!("{bytes} bytes from offset {from} to offset {to}");
            ensure_bytes(what, &seen, &wanted)?;
            me.poison(&landing.local, to..to + bytes);
        }
    }
    me.meet()
}

/// Blocks are put into one place of the next rank and got back from there in turn, all submitted
/// ahead: each get sees the block put last, and none of those put later.
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
        // Written and read by the previous rank.
        let scratch = me.bytes(block)?;
        let sent = pattern(seed(me.me, 0), BLOCKS * block);
        me.write(&source.local, 0, &sent);
        me.meet()?;
        let mut driver = me.engine()?;
        let there = &scratch.remote[me.after(1)];
        let ops: Vec<OpOf<'_, H>> = (0..BLOCKS)
            .map(|number| number * block)
            .flat_map(|at| {
                let there = (there, 0);
                [put(there, (&source.local, at), block), get((&landing.local, at), there, block)]
            })
            .collect();
        driver.run(&ops)?;
        me.ensure_bytes("blocks put and got back", &landing.local, 0, &sent)?;
        me.meet()
    })
}

/// The owner overwrites what was got the moment it sees the flag.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_signal_to_a_peer_comes_after_the_gets_from_it<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 6;
    on_each(harness, [2, 3], |me| {
        let bytes = aligned(&me.caps, 300_000);
        // At rank 0 a slot for each reader.
        let source = me.bytes(bytes * me.ranks as u64)?;
        let landing = me.bytes(bytes)?;
        let flags = me.flags(me.ranks as u64)?;
        let mut driver = me.engine()?;
        for round in 1..=ROUNDS {
            let sent = |rank: usize| pattern(seed(rank, round), bytes);
            if me.me == 0 {
                for reader in 1..me.ranks {
                    me.write(&source.local, reader as u64 * bytes, &sent(reader));
                }
            }
            me.meet()?;
            if me.me == 0 {
                for reader in 1..me.ranks as u64 {
                    driver.reach(&flags.local, reader, round)?;
                    me.poison(&source.local, reader * bytes..(reader + 1) * bytes);
                }
            } else {
                let slot = me.me as u64;
                driver.run(&[
                    get((&landing.local, 0), (&source.remote[0], slot * bytes), bytes),
                    signal(&flags.remote[0], slot, round),
                ])?;
                let what = "bytes got before a signal, then overwritten";
                me.ensure_bytes(what, &landing.local, 0, &sent(me.me))?;
            }
            me.meet()?;
        }
        Ok(())
    })
}

/// A thread watches the flag and looks at the bytes the moment it sees it.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_signal_to_oneself_announces_the_gets_before_it<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 6;
    on_each(harness, 1..=3, |me| {
        let bytes = aligned(&me.caps, 300_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes * me.ranks as u64)?);
        let flags = me.flags(1)?;
        let mut driver = me.engine()?;
        for round in 1..=ROUNDS {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            me.poison(&landing.local, 0..bytes * me.ranks as u64);
            me.meet()?;
            let mut ops: Vec<OpOf<'_, H>> = (0..me.ranks)
                .map(|peer| {
                    let slot = (&landing.local, peer as u64 * bytes);
                    get(slot, (&source.remote[peer], 0), bytes)
                })
                .collect();
            ops.push(signal(&flags.remote[me.me], 0, round));
            std::thread::scope(|scope| {
                let (harness, patience) = (me.harness, me.patience("one's own signal"));
                let (flags, landing, ranks) = (&flags.local, &landing.local, me.ranks);
                let watcher = scope.spawn(move || {
                    while flags.flag_value(0).is_none_or(|seen| seen < round) {
                        patience.check(|| "no flag".to_owned())?;
                        std::thread::yield_now();
                    }
                    // The last one first, which had least time.
                    (0..ranks).rev().try_for_each(|peer| {
                        let here = read(harness, landing, peer as u64 * bytes, bytes);
                        let what = format!("bytes of rank {peer}, announced to oneself");
                        ensure_bytes(what, &here, &pattern(seed(peer, round), bytes))
                    })
                });
                driver.run(&ops)?;
                watcher.join().map_err(|_| Failure::new("the watching thread panicked"))?
            })?;
            me.meet()?;
        }
        Ok(())
    })
}

/// Gets of many lengths, looked at by the host and by another engine as soon as the ticket completes.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_completed_get_is_visible_here<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 3], |me| {
        let lengths = lengths(&me.caps);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let (source, landing, copy) = (me.bytes(longest)?, me.bytes(longest)?, me.bytes(longest)?);
        let flags = me.flags(1)?;
        let (mut driver, mut other) = (me.engine()?, me.engine()?);
        let from = me.after(1);
        for (round, bytes) in (1..).zip(lengths) {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            me.meet()?;
            let gate = driver.caps().queued_wait.then(|| wait(&flags.local, 0, round));
            let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
            ops.push(get((&landing.local, 0), (&source.remote[from], 0), bytes));
            let (mut ticket, rest) = driver.submit_held(&ops)?;
            // An engine that says "complete" now is taken at its word.
            if !rest.is_empty() || driver.completed()? < ticket {
                other.run(&[signal(&flags.remote[me.me], 0, round)])?;
                ticket = driver.submit_all(rest)?;
            }
            driver.finish(ticket)?;
            let sent = pattern(seed(from, round), bytes);
            me.ensure_bytes("a completed get", &landing.local, 0, &sent)?;
            other.run(&[put((&copy.remote[me.me], 0), (&landing.local, 0), bytes)])?;
            me.ensure_bytes("a completed get, sent on", &copy.local, 0, &sent)?;
            me.poison(&landing.local, 0..bytes);
            me.poison(&copy.local, 0..bytes);
            me.meet()?;
        }
        Ok(())
    })
}

/// Through an alias, from allocated and from registered memory, and behind a put to the same place.
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
            let what = format!("a get from oneself, {name} memory");
            me.ensure_bytes(&what, &landing.local, 0, &first)?;
            let what = format!("{what}, behind a put");
            me.ensure_bytes(&what, &landing.local, bytes, &second)?;
            me.meet()?;
        }
        Ok(())
    })
}

/// A get waits for the flag of the rank that it copies from; bytes that the rank's host, and those
/// that its engine, wrote before the signal are what it copies.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_get_behind_a_wait_sees_what_the_wait_acquired<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 8;
    on_each(harness, [1, 2, 3], |me| {
        let bytes = aligned(&me.caps, 5000);
        // Half is written by the host, half by an engine.
        let (fresh, source, landing) =
            (me.bytes(bytes)?, me.bytes(2 * bytes)?, me.bytes(2 * bytes)?);
        let flags = me.flags(1)?;
        let (mut driver, mut writer) = (me.engine()?, me.engine()?);
        let (from, reader) = (me.after(1), me.after(me.ranks - 1));
        for round in 1..=ROUNDS {
            let sent = |rank: usize| pattern(seed(rank, round), 2 * bytes);
            me.poison(&source.local, 0..2 * bytes);
            me.poison(&landing.local, 0..2 * bytes);
            me.meet()?;
            let ops = [
                wait(&flags.local, 0, round),
                get((&landing.local, 0), (&source.remote[from], 0), 2 * bytes),
            ];
            let (ticket, rest) = driver.submit_held(&ops)?;
            driver.stays(QUIET / 5, |done| {
                ensure!(done < ticket, "the get behind the wait is complete");
                me.ensure_poison("bytes got behind the wait", &landing.local, 0..2 * bytes)
            })?;
            me.meet()?;
            let (own, half) = (sent(me.me), usize::try_from(bytes).expect("a few bytes"));
            me.write(&source.local, 0, &own[..half]);
            me.write(&fresh.local, 0, &own[half..]);
            writer.run(&[put((&source.remote[me.me], bytes), (&fresh.local, 0), bytes)])?;
            writer.run(&[signal(&flags.remote[reader], 0, round)])?;
            driver.run(rest)?;
            let last = driver.submit(&[])?;
            driver.finish(last)?;
            me.ensure_bytes("bytes got behind a wait", &landing.local, 0, &sent(from))?;
            me.meet()?;
        }
        Ok(())
    })
}

/// Destination and source that leave their regions or, where there is a rule, are misaligned, behind
/// an op that is in order; the engine goes on afterwards.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_get_outside_its_regions_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let (align, bytes) = (caps.put_align_bytes, aligned(&caps, 256));
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let mut driver = me.engine()?;
        let (to, from) = (|at| (&landing.local, at), |at| (&source.remote[0], at));
        let far = u64::MAX / align * align;
        let mut wrong: Vec<(&str, OpOf<'_, H>)> = vec![
            ("a destination that ends behind the region", get(to(align), from(0), bytes)),
            ("a source that ends behind the region", get(to(0), from(align), bytes)),
            ("a destination behind the region", get(to(bytes + align), from(0), 0)),
            ("a source behind the region", get(to(0), from(bytes + align), 0)),
            ("a destination whose end overflows", get(to(far), from(0), align)),
            ("a source whose end overflows", get(to(0), from(far), align)),
            ("more bytes than there can be", get(to(0), from(0), far)),
        ];
        if align > 1 {
            wrong.extend([
                ("a misaligned destination", get(to(1), from(0), align)),
                ("a misaligned source", get(to(0), from(1), align)),
                ("a misaligned length", get(to(0), from(0), 1)),
            ]);
        }
        let right = get(to(0), from(0), bytes);
        for (what, op) in wrong {
            for ops in [&[op][..], &[right, op]] {
                if ops.len() <= caps.slice_ops_max {
                    match driver.try_submit(ops) {
                        Ok(ticket) => ensure!(false, "{what}: taken as ticket {}", ticket.0),
                        Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                        Err(error) => Err(Failure::from(error).within(what))?,
                    }
                }
            }
        }
        driver.run(&[])?;
        me.ensure_poison("bytes of refused slices", &landing.local, 0..landing.local.bytes())?;
        me.write(&source.local, 0, &pattern(seed(0, 0), bytes));
        driver.run(&[right])?;
        me.ensure_bytes("a get after refusals", &landing.local, 0, &pattern(seed(0, 0), bytes))
    })
}
