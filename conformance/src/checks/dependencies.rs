//! Checks contract 9: dependencies.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    DmaBuf, DynRegion, Error as _, ErrorKind, Fabric, Flush, PeerMemory, Rank, Region, Role, Space,
};

use super::rounds::Rounds;
use crate::data::{aligned, pattern, seed};
use crate::engine::{OpOf, put, signal, wait_reset};
use crate::failure::{Failure, Outcome, ensure, ensure_all};
use crate::harness::{Harness, LocalOf};
use crate::ranks::{engine_of, on_each, on_ranks};

/// Signals interleaved words of every rank from all ranks at once, with and without resets of
/// neighbouring words. Each word must end with its own value.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn flags_of_one_region_do_not_disturb_each_other<H: Harness>(harness: &H) -> Outcome {
    const WORDS: u64 = 64;
    const ROUNDS: u64 = 5;
    on_each(harness, 1..=4, |me| {
        let ranks = me.ranks as u64;
        let flags = me.flags(WORDS * ranks)?;
        let mut engine = me.engine()?;
        let value = |word: u64, round: u64| round << 40 | word << 8 | 0x5A;
        let mut random = fastrand::Rng::with_seed(seed(me.me, 0));

        for round in 1..=ROUNDS {
            let mut ops: Vec<OpOf<'_, H>> = Vec::new();
            for word in (0..WORDS).map(|word| word * ranks + me.me as u64) {
                ops.extend(flags.remote.iter().map(|to| signal(to, word, value(word, round))));
            }
            random.shuffle(&mut ops);
            engine.run(&ops)?;
            for word in 0..WORDS * ranks {
                engine.wait_for_flag(&flags.local, word, value(word, round))?;
            }

            me.barrier()?;
            for at in 0..WORDS * ranks {
                let expected = value(at, round);
                let seen = me.flag_value(&flags.local, at)?;
                ensure!(
                    seen == expected,
                    "flag {at} has the value {seen:#x}, expected {expected:#x}"
                );
            }
            me.barrier()?;
        }

        if engine.caps().queued_wait {
            let odd = (0..WORDS * ranks).filter(|word| word % 2 == 1);
            let ops: Vec<OpOf<'_, H>> = odd.map(|at| wait_reset(&flags.local, at, 1)).collect();
            engine.run(&ops)?;
            for at in 0..WORDS * ranks {
                let expected = if at % 2 == 1 { 0 } else { value(at, ROUNDS) };
                let seen = me.flag_value(&flags.local, at)?;
                ensure!(
                    seen == expected,
                    "after resets of other flags, flag {at} has the value {seen:#x}, expected \
                     {expected:#x}"
                );
            }
        }
        me.barrier()
    })
}

/// Writes through two aliases of one region, for allocated memory and for memory registered at an
/// odd offset. The bytes must be in the region, and must stay when the aliases are dropped.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn ones_own_key_gives_an_alias<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let bytes = aligned(&caps, 1000);
        let align = aligned(&caps, 1);
        let mut regions = vec![("allocated", me.allocate(2 * bytes, Role::Data)?)];
        if let Some(memory) = me.own_memory(2 * bytes + 2 * align) {
            let start = usize::try_from(align).expect("an alignment");
            let end = start + usize::try_from(2 * bytes).expect("a few bytes");
            regions.push(("registered", me.register(&*memory, start..end, Role::Data)?));
        }
        let source = me.allocate(bytes, Role::Data)?;

        for (name, region) in regions {
            me.poison(&region, 0..2 * bytes);
            let sent = [pattern(seed(0, 1), bytes), pattern(seed(0, 2), bytes)];
            {
                let key = me.fabric.memory().export(&region)?;
                let alias = || {
                    let alias = me.fabric.memory().import(me.rank(), &key, me.deadline());
                    alias.map_err(|e| {
                        Failure::from(e).within(format!("import of {name} memory as an alias"))
                    })
                };
                let aliases = [alias()?, alias()?];
                let mut engine = me.engine()?;
                for (slot, alias) in (0..).zip(&aliases) {
                    me.write(&source, 0, &sent[slot]);
                    let to = (alias, slot as u64 * bytes);
                    engine.run(&[put(to, (&source, 0), bytes)])?;
                }
            }
            let what = format!("{name} memory, written through aliases");
            me.ensure_bytes(&what, &region, 0, &sent.concat())?;
        }
        Ok(())
    })
}

/// Registers a part of what another fabric allocated, as data and as flags, in a second fabric. The
/// first fabric must see what the second one puts and signals there, at the addresses of its own
/// regions.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn what_one_fabric_allocated_another_can_register<H: Harness>(harness: &H) -> Outcome {
    const WORDS: u64 = 8;
    const WORD: u64 = 3;
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let (bytes, head) = (aligned(&caps, 5000), aligned(&caps, 33));
        let landing = me.bytes(bytes + 2 * head)?;
        let flags = me.flags(WORDS)?;
        let sent = pattern(seed(0, 1), bytes);
        on_ranks(me.harness, 1, |other| {
            let part = |region: &LocalOf<H>, head: u64, bytes: u64, role| {
                let base = region.base().as_ptr().wrapping_add(head as usize);
                let base = NonNull::new(base).expect("an address inside a region");
                // SAFETY: inside the region, which lives as long as the other fabric's ranks; the
                // flags are zero, and only engines touch them.
                let part = unsafe { other.fabric.memory().register(base, bytes, role) };
                part.map_err(|e| Failure::from(e).within(format!("register as {role:?}")))
            };
            let data = part(&landing.local, head, bytes, Role::Data)?;
            let word = part(&flags.local, WORD * 8, 8, Role::Flags)?;
            let (data, word) = (other.share(data)?, other.share(word)?);
            let source = other.bytes(bytes)?;
            other.write(&source.local, 0, &sent);
            other.engine()?.run(&[
                put((&data.remote[0], 0), (&source.local, 0), bytes),
                signal(&word.remote[0], 0, 7),
            ])
        })
        .map_err(|failure: Failure| failure.within("on the other fabric"))?;
        me.engine()?.wait_for_flag(&flags.local, WORD, 7)?;
        me.ensure_bytes("bytes put by the other fabric", &landing.local, head, &sent)?;
        me.ensure_poison("bytes in front of the registered ones", &landing.local, 0..head)?;
        me.ensure_poison(
            "bytes after the registered ones",
            &landing.local,
            head + bytes..bytes + 2 * head,
        )?;
        for word in 0..WORDS {
            let expected = if word == WORD { 7 } else { 0 };
            let seen = me.flag_value(&flags.local, word)?;
            ensure!(
                seen == expected,
                "flag {word}, signalled by the other fabric, has the value {seen}, expected \
                 {expected}"
            );
        }
        Ok(())
    })
}

/// Reads flags that were signalled and flags that were not, words outside the region, and a region
/// of data.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_region_tells_what_its_flags_hold<H: Harness>(harness: &H) -> Outcome {
    const WORDS: u64 = 8;
    on_ranks(harness, 2, |me| {
        let flags = me.flags(WORDS)?;
        let data = me.allocate(64, Role::Data)?;
        let mut engine = me.engine()?;
        let value = |word: u64| [0x1234_5678_9ABC_DEF0, 0, 1, u64::MAX][(word % 4) as usize];
        let words = (0..WORDS).filter(|word| word % 4 != 1);
        let to = &flags.remote[me.rank_after(1)];
        let ops: Vec<OpOf<'_, H>> = words.map(|word| signal(to, word, value(word))).collect();
        engine.run(&ops)?;
        // This rank's tickets do not cover the peer's signals. They arrive in order, so the last one shows
        // that all have arrived.
        engine.wait_for_flag(&flags.local, WORDS - 1, value(WORDS - 1))?;
        for word in 0..WORDS {
            let (seen, expected) = (me.flag_value(&flags.local, word)?, value(word));
            ensure!(
                seen == expected,
                "flag_value({word}) returned {seen:x?}, expected {expected:x?}"
            );
        }
        for word in [WORDS, u64::MAX] {
            let seen = flags.local.flag_value(word);
            ensure!(
                seen.is_none(),
                "flag_value({word}) outside the region returned {seen:x?}, expected None"
            );
        }

        let mut adjacent = [[0; 8]; WORDS as usize - 1];
        // A device that is busy may not answer at once.
        let time_limit = me.time_limit("the values of 7 flags");
        while !flags.local.flag_values(1, &mut adjacent) {
            time_limit.check(|| "flag_values(1, 7 words) returned false".to_owned())?;
            std::thread::yield_now();
        }
        for (word, seen) in (1..).zip(adjacent.map(u64::from_ne_bytes)) {
            let expected = value(word);
            ensure!(
                seen == expected,
                "flag_values(1, 7 words) returned {seen:x?} for word {word}, expected {expected:x?}"
            );
        }
        ensure!(
            !flags.local.flag_values(2, &mut adjacent),
            "flag_values(2, 7 words) leaves the region and returned true, expected false"
        );

        let seen = data.flag_value(0);
        ensure!(seen.is_none(), "flag_value(0) of a data region returned {seen:x?}, expected None");
        me.barrier()
    })
}

/// Allocates data and flags of several sizes, and fills the data so that the next allocation of that size is dirty if it is not
/// zeroed.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn allocated_memory_is_zeroed<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        for bytes in [8, 1000, 100_000, 4 << 20].map(|bytes| aligned(&me.caps, bytes)) {
            for round in 0..2 {
                let region = me.allocate(bytes, Role::Data)?;
                ensure_all(
                    format!("allocation {round} of {bytes} bytes"),
                    &me.read(&region, 0, bytes),
                    0,
                )?;
                me.poison(&region, 0..bytes);
            }

            let flags = me.allocate(bytes / 8 * 8, Role::Flags)?;
            for word in [0, bytes / 16, bytes / 8 - 1] {
                let seen = me.flag_value(&flags, word)?;
                ensure!(seen == 0, "flag {word} of {bytes} new bytes is {seen:#x}, expected 0");
            }
        }
        Ok(())
    })
}

/// Memory of a device that no backend knows, at an address that is none of the host.
struct Foreign;

// SAFETY: the memory is of an imaginary device, which nobody accesses.
unsafe impl Region for Foreign {
    fn base(&self) -> NonNull<u8> {
        // The lowest pages are never mapped.
        NonNull::new(std::ptr::without_provenance_mut(4096)).expect("it is not 0")
    }

    fn bytes(&self) -> u64 {
        4096
    }

    fn space(&self) -> Space {
        Space::Device
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        None
    }

    fn flag_value(&self, _word: u64) -> Option<u64> {
        None
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        Err("the device of this check has no dma-buf".to_owned())
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        None
    }

    unsafe fn allow_reuse(&self) {}
}

/// Adopts a region of device memory that is of no device of the backend.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn memory_of_another_device_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let region = DynRegion::new(Arc::new(Foreign));
        for role in [Role::Data, Role::Flags] {
            // SAFETY: the region lives, and nobody accesses its memory.
            let adopted = unsafe { me.fabric.memory().adopt(&region, role) };
            ensure!(
                adopted.is_err(),
                "adopt of device memory of another device as {role:?} succeeded"
            );
        }
        Ok(())
    })
}

/// Imports a key of this rank in a fabric that is not connected.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn memory_of_a_rank_that_is_not_connected_cannot_be_imported<H: Harness>(
    harness: &H,
) -> Outcome {
    on_ranks(harness, 1, |me| {
        let region = me.allocate(64, Role::Data)?;
        let key = me.fabric.memory().export(&region)?;
        let fresh =
            me.fabric.reopen(me.rank(), 1).map_err(|e| Failure::from(e).within("reopen"))?;
        match fresh.memory().import(me.rank(), &key, me.deadline()) {
            Err(error) if error.kind() == ErrorKind::PeerLost => Ok(()),
            Err(error) => Err(Failure::from(error).within("expected PeerLost, found")),
            Ok(_) => Err(Failure::new(
                "import in a fabric without connections succeeded, expected PeerLost",
            )),
        }
    })
}

/// Allocates and registers memory of no bytes on every rank, and makes copies of no bytes between them.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn memory_of_no_bytes_is_memory<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let own = me.own_memory(8);
        let registered = own.map(|own| me.register(&*own, 0..0, Role::Data)).transpose()?;
        let regions = [Some(me.allocate(0, Role::Data)?), registered];
        for region in regions.into_iter().flatten() {
            let found = region.bytes();
            ensure!(found == 0, "a region of no bytes has {found} bytes");
            let window = me.share(region)?;
            let mut engine = me.engine()?;
            let next = &window.remote[me.rank_after(1)];
            engine.run(&[put((next, 0), (&window.local, 0), 0)])?;
            me.barrier()?;
        }
        Ok(())
    })
}

/// Connects all ranks again, with the same addresses, while engines and imports exist.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_second_connection_to_a_peer_changes_nothing<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2, 3], |me| {
        let bytes = aligned(&me.caps, 1000);
        let rounds = Rounds::open(me, bytes)?;
        let mut engine = me.engine()?;
        rounds.round(me, &mut engine, 1, bytes)?;
        for (peer, address) in Rank::all(me.ranks).zip(me.exchange(me.fabric.address())?) {
            let connected = me.fabric.connect(peer, &address, me.deadline());
            let place = || format!("connect rank {peer} again");
            connected.map_err(|e| Failure::from(e).within(place()))?;
        }
        me.barrier()?;

        let later = Rounds::open(me, bytes)?;
        let mut later_engine = me.engine()?;
        for round in 1..=2 {
            rounds.round(me, &mut engine, round + 1, bytes)?;
            later.round(me, &mut later_engine, round, bytes)?;
        }
        me.barrier()
    })
}

/// Puts to a peer with an engine that was created before the connection to that peer, and with one that was created after it.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_engine_refuses_or_runs_ops_with_peers_that_were_connected_after_its_creation<
    H: Harness,
>(
    harness: &H,
) -> Outcome {
    on_ranks(harness, 2, |me| {
        let (mut again, early) = me.reopen_with(me.rank(), engine_of::<H>)?;
        let bytes = aligned(&again.caps, 1000);
        let (source, landing) = (again.bytes(bytes)?, again.bytes(bytes)?);
        let flags = again.flags(1)?;
        let mut early = again.drive(early);
        let mut later = again.engine()?;
        let peer = again.rank_after(1);
        for (round, engine) in (1..).zip([&mut early, &mut later]) {
            again.write(&source.local, 0, &pattern(seed(again.me, round), bytes));
            let ops = [
                put((&landing.remote[peer], 0), (&source.local, 0), bytes),
                signal(&flags.remote[peer], 0, round),
            ];
            let mut runs = true;
            for (number, op) in ops.into_iter().enumerate() {
                let may_refuse = round == 1 && number == 0;
                match engine.try_submit(&[op]) {
                    Ok(ticket) => engine.finish(ticket)?,
                    Err(error) if may_refuse && error.kind() == ErrorKind::InvalidArgument => {
                        runs = false;
                        break;
                    }
                    Err(error) => return Err(Failure::from(error).within("op with the peer")),
                }
            }
            let theirs = again.exchange(vec![u8::from(runs)])?;
            if theirs[peer] == [1] {
                engine.wait_for_flag(&flags.local, 0, round)?;
                let sent = pattern(seed(peer, round), bytes);
                again.ensure_bytes("a put from the peer", &landing.local, 0, &sent)?;
            } else {
                let what = "destination of a put that was refused";
                again.ensure_poison(what, &landing.local, 0..bytes)?;
            }
            // The engine must still serve this rank.
            engine.run(&[put((&landing.remote[again.me], 0), (&source.local, 0), bytes)])?;
            again.poison(&landing.local, 0..bytes);
            again.barrier()?;
        }
        Ok(())
    })
}

/// Fills flags, drops them for reuse, and allocates flags of the same length.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn memory_that_is_reused_is_zeroed<H: Harness>(harness: &H) -> Outcome {
    const WORDS: usize = 8;
    on_ranks(harness, 1, |me| {
        for round in 0..3 {
            let region = me.fabric.memory().allocate_polled_flags(WORDS as u64 * 8)?;
            let Some(flags) = region.flags() else {
                return Err(Failure::new("flags() of polled flags returned None"));
            };

            for (word, flag) in flags.iter().enumerate().take(WORDS) {
                let seen = flag.swap(u64::MAX, Ordering::AcqRel);
                ensure!(seen == 0, "allocation {round}: flag {word} is {seen:x}, expected 0");
            }
            // SAFETY: no peer has imported the region.
            unsafe { region.allow_reuse() };
        }
        me.barrier()
    })
}

/// Opens the fabric of every rank again as the next rank, and sends over both in turn.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_fabric_opens_again_as_another_rank<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 1..=3, |me| {
        let bytes = aligned(&me.caps, 1000);
        let rounds = Rounds::open(me, bytes)?;
        let mut engine = me.engine()?;
        rounds.round(me, &mut engine, 1, bytes)?;
        let mut again = me.reopen(Rank::at(me.rank_after(1)))?;
        let later = Rounds::open(&mut again, bytes)?;
        let mut later_engine = again.engine()?;
        for round in 1..=2 {
            later.round(&again, &mut later_engine, round, bytes)?;
            rounds.round(me, &mut engine, round + 1, bytes)?;
        }
        again.barrier()
    })
}
