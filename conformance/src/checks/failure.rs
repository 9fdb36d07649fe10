//! Checks contract 8: failure.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{
    BackendId, CopyEngine, Deadline, Error, ErrorKind, Fabric, KEY_MAGIC, PeerMemory, Rank,
    RemoteKey, Role,
};

use crate::data::{POISON, aligned, pattern, seed};
use crate::engine::{OpOf, put, wait};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{ErrorOf, Harness, KeyOf, LocalOf, RemoteOf};
use crate::ranks::{Participant, QUIET, on_each, on_ranks};

/// Gives concurrent runs of the check of malformed keys different region sizes.
static SIZES: AtomicU8 = AtomicU8::new(0);

/// Limits an import or connect with malformed bytes, which may name a peer that does not answer.
const MALFORMED_TIMEOUT: Duration = Duration::from_secs(1);

/// Breaks the engine through the harness. Every later call that can fail must fail with the same
/// kind.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn the_first_error_poisons_the_engine<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let bytes = aligned(&me.caps, 100);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let mut engine = me.engine()?;
        let op = [put((&landing.remote[0], 0), (&source.local, 0), bytes)];
        engine.run(&op)?;
        let expected = me.harness.break_engine(&mut engine.inner);
        let expected = expected
            .ok_or_else(|| Failure::new("Harness::break_engine did not break the engine"))?;
        for round in 1..=3 {
            let answers = [
                ("submit", engine.try_submit(&op).map(drop)),
                ("completed", engine.inner.completed().map(drop)),
                ("park", engine.inner.park(Duration::from_millis(1))),
                ("submit of an empty slice", engine.try_submit(&[]).map(drop)),
                ("release", engine.inner.release()),
            ];
            for (call, answer) in answers {
                let kind = answer.map_err(|error| error.kind());
                ensure!(
                    kind == Err(expected),
                    "{call} returned {kind:?} in round {round} after the error, expected \
                     {expected:?}"
                );
            }
        }
        if me.harness.faults_are_device_wide() {
            return Ok(());
        }
        let mut other = me.engine()?;
        other.run(&op).map_err(|failure| failure.within("on another engine after the error"))
    })
}

/// Decodes truncated, changed, extended and random keys. A changed key that can still be decoded
/// must be refused by the import, or name the same registration and no more bytes.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn malformed_keys_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        // No registration of another check has this size, so a changed key can only be taken for one of
        // the two ranks' regions.
        let size = vec![SIZES.fetch_add(1, Ordering::Relaxed)];
        let steps = u64::from(me.exchange(size)?[0][0]);
        let region = me.allocate(aligned(&me.caps, 7919) + steps * 64, Role::Data)?;
        let key = me.fabric.memory().export(&region)?.encode();
        let keys = me.exchange(key)?;
        let key = &keys[1 - me.me];
        let own = KeyOf::<H>::decode(key)?;
        for end in 0..key.len() {
            ensure_undecodable::<H>(
                &key[..end],
                &format!("the first {end} of {} bytes", key.len()),
            )?;
        }
        let extended = [&key[..], &[0]].concat();
        ensure_undecodable::<H>(&extended, "a key with an extra byte")?;
        for (field, span) in [("magic", 0..4), ("version", 4..6)] {
            for byte in span {
                let flipped = flip(key, byte, 0xFF);
                ensure_undecodable::<H>(&flipped, &format!("a key with another {field}"))?;
            }
        }
        for byte in 6..8 {
            ensure_refused(me, &flip(key, byte, 0xFF), "a key with another backend number")?;
        }
        let foreign = BackendId(me.fabric.backend().0 ^ 0x4000).0.to_le_bytes();
        let foreign_key = [&KEY_MAGIC[..], &key[4..6], &foreign, &key[8..]].concat();
        ensure_refused(me, &foreign_key, "a key of another backend")?;
        for (byte, mask) in flips(key.len()) {
            let Ok(flipped) = KeyOf::<H>::decode(&flip(key, byte, mask)) else { continue };
            flipped_import(
                me,
                &flipped,
                &own,
                &format!("key with byte {byte} changed by ^ {mask:#04x}"),
            )?;
        }
        random_bytes(|bytes| drop(KeyOf::<H>::decode(bytes)));
        me.barrier()
    })
}

fn ensure_undecodable<H: Harness>(bytes: &[u8], what: &str) -> Outcome {
    match KeyOf::<H>::decode(bytes) {
        Ok(_) => {
            Err(Failure::new(format!("{what} was decoded without an error, expected InvalidKey")))
        }
        Err(error) => {
            let kind = error.kind();
            ensure!(
                kind == ErrorKind::InvalidKey,
                "{what}: the error has the kind {kind}, expected InvalidKey: {error}"
            );
            Ok(())
        }
    }
}

/// Checks that a key is refused when it is decoded, or when it is imported.
fn ensure_refused<H: Harness>(me: &Participant<'_, H>, bytes: &[u8], what: &str) -> Outcome {
    let Ok(key) = KeyOf::<H>::decode(bytes) else {
        return ensure_undecodable::<H>(bytes, what);
    };
    let deadline = Deadline::after(MALFORMED_TIMEOUT.min(me.harness.timeout()));
    match me.fabric.memory().import(Rank::at(1 - me.me), &key, deadline) {
        Ok(_) => {
            Err(Failure::new(format!("{what} was imported without an error, expected InvalidKey")))
        }
        Err(error) => ensure_kind(&error, &[ErrorKind::InvalidKey], what),
    }
}

fn flipped_import<H: Harness>(
    me: &Participant<'_, H>,
    flipped: &KeyOf<H>,
    own: &KeyOf<H>,
    what: &str,
) -> Outcome {
    let deadline = Deadline::after(MALFORMED_TIMEOUT.min(me.harness.timeout()));
    match me.fabric.memory().import(Rank::at(1 - me.me), flipped, deadline) {
        Ok(_) => {
            let (seen, expected) = (flipped.generation(), own.generation());
            ensure!(
                seen == expected,
                "{what}: import gave the registration {seen:?}, expected {expected:?}"
            );
            let (seen, expected) = (flipped.region_bytes(), own.region_bytes());
            ensure!(
                seen <= expected,
                "{what}: import gave {seen} bytes, expected at most {expected}, the length of the \
                 region"
            );
            Ok(())
        }
        Err(error) => ensure_kind(&error, &[ErrorKind::InvalidKey, ErrorKind::PeerLost], what),
    }
}

fn ensure_kind<E: Error>(error: &E, expected: &[ErrorKind], what: &str) -> Outcome {
    let kind = error.kind();
    ensure!(
        expected.contains(&kind),
        "{what}: the error has the kind {kind}, expected one of {expected:?}: {error}"
    );
    Ok(())
}

fn flip(bytes: &[u8], byte: usize, mask: u8) -> Vec<u8> {
    let mut flipped = bytes.to_vec();
    flipped[byte] ^= mask;
    flipped
}

fn flips(bytes: usize) -> impl Iterator<Item = (usize, u8)> {
    let masks = (0..8).map(|bit| 1 << bit).chain([0xFF]);
    (0..bytes).flat_map(move |byte| masks.clone().map(move |mask| (byte, mask)))
}

/// Passes random bytes to `parse`, half of which begin with the magic number of a key.
fn random_bytes(mut parse: impl FnMut(&[u8])) {
    let mut random = fastrand::Rng::with_seed(seed(0, 8));
    for _ in 0..2000 {
        let mut bytes = vec![0; random.usize(..200)];
        random.fill(&mut bytes);
        if random.bool() && bytes.len() > 4 {
            bytes[..4].copy_from_slice(&KEY_MAGIC);
        }
        parse(&bytes);
    }
}

/// Encodes a key, decodes it and encodes it again. Bytes, size and generation must stay the same,
/// and the key must be importable.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_key_survives_encoding<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 3], |me| {
        let mut generations = Vec::new();
        for (bytes, role) in
            [(8, Role::Flags), (1, Role::Data), (4096, Role::Data), (70_001, Role::Data)]
        {
            let region = me.allocate(bytes, role)?;
            let key = me.fabric.memory().export(&region)?;
            let encoded = key.encode();
            let decoded = KeyOf::<H>::decode(&encoded)?;
            ensure!(
                decoded.encode() == encoded,
                "the key of a region of {bytes} bytes changed when it was decoded and encoded again"
            );
            let (seen, expected) = (decoded.region_bytes(), key.region_bytes());
            ensure!(seen == expected, "region_bytes is {seen} after decoding, expected {expected}");
            ensure!(expected == bytes, "region_bytes is {expected} for a region of {bytes} bytes");
            let (seen, expected) = (decoded.generation(), key.generation());
            ensure!(
                seen == expected,
                "the generation is {seen:?} after decoding, expected {expected:?}"
            );
            ensure!(
                !generations.contains(&seen),
                "two registrations have the same generation {seen:?}, expected different ones"
            );
            generations.push(seen);
            drop(me.share(region)?);
            me.barrier()?;
        }
        Ok(())
    })
}

/// Imports the key of freed memory, as the owner and as a peer, for allocated and registered
/// memory, also when the address is in use again.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn the_key_of_freed_memory_is_refused<H: Harness>(harness: &H) -> Outcome {
    const BYTES: usize = 4096;
    on_each(harness, [1, 2], |me| {
        let own_memory = me.own_memory(BYTES as u64);
        let make = |me: &Participant<'_, H>, own: bool| match (&own_memory, own) {
            (Some(memory), true) => Ok(Some(me.register(&**memory, 0..BYTES, Role::Data)?)),
            (None, true) => Ok(None),
            _ => me.allocate(BYTES as u64, Role::Data).map(Some),
        };
        for own in [false, true] {
            for _ in 0..3 {
                let Some(first) = make(me, own)? else { continue };
                let key = me.fabric.memory().export(&first)?.encode();
                let keys = me.exchange(key)?;
                // The key is valid while the memory lives. The import ends first.
                drop(import_all(me, &keys)?);
                me.barrier()?;
                drop(first);
                me.barrier()?;
                ensure_all_refused(me, &keys, "freed memory")?;
                let again: Option<LocalOf<H>> = make(me, own)?;
                me.barrier()?;
                ensure_all_refused(me, &keys, "freed memory whose address is in use again")?;
                me.barrier()?;
                drop(again);
            }
        }
        me.barrier()
    })
}

fn import_all<H: Harness>(me: &Participant<'_, H>, keys: &[Vec<u8>]) -> Outcome<Vec<RemoteOf<H>>> {
    let import = |(peer, key): (Rank, &Vec<u8>)| {
        let key = KeyOf::<H>::decode(key)?;
        Ok(me.fabric.memory().import(peer, &key, me.deadline())?)
    };
    Rank::all(me.ranks).zip(keys).map(import).collect()
}

fn ensure_all_refused<H: Harness>(
    me: &Participant<'_, H>,
    keys: &[Vec<u8>],
    what: &str,
) -> Outcome {
    for (peer, key) in Rank::all(me.ranks).zip(keys) {
        let key = KeyOf::<H>::decode(key)?;
        let what = format!("a key of {what} of rank {peer}");
        match me.fabric.memory().import(peer, &key, me.deadline()) {
            Ok(_) => {
                return Err(Failure::new(format!(
                    "{what} was imported without an error, expected InvalidKey"
                )));
            }
            Err(error) => ensure_kind(&error, &[ErrorKind::InvalidKey], &what)?,
        }
    }
    Ok(())
}

/// Connects to truncated, extended, random and changed addresses and to another rank's address.
/// Afterwards the correct address must still connect.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn malformed_addresses_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        let addresses = me.exchange(me.fabric.address())?;
        let (peer, address) = (Rank::at(1 - me.me), &addresses[1 - me.me]);
        // A separate fabric, so that failed attempts do not affect the ranks' connections.
        let mut fabric = me.harness.open(me.rank(), 2)?;
        let mut connect = |address: &[u8]| {
            fabric.connect(
                peer,
                address,
                Deadline::after(MALFORMED_TIMEOUT.min(me.harness.timeout())),
            )
        };
        let ensure_refused = |what: &str, answer: Result<(), ErrorOf<H>>| match answer {
            Ok(()) => {
                Err(Failure::new(format!("connect to {what} returned no error, expected Mismatch")))
            }
            Err(error) => ensure_kind(&error, &[ErrorKind::Mismatch], what),
        };
        for end in 0..address.len() {
            let what = format!("the first {end} of the address's {} bytes", address.len());
            ensure_refused(&what, connect(&address[..end]))?;
        }
        ensure_refused("an address with an extra byte", connect(&[&address[..], &[0]].concat()))?;
        ensure_refused("another rank's address", connect(&addresses[me.me]))?;
        ensure_refused("random bytes", connect(&pattern(seed(0, 9), address.len() as u64)))?;
        // A changed address may still be well formed and name a rank that is gone or unreachable.
        let kinds =
            [ErrorKind::Mismatch, ErrorKind::PeerLost, ErrorKind::Timeout, ErrorKind::Unavailable];
        for (byte, mask) in flips(address.len()) {
            if let Err(error) = connect(&flip(address, byte, mask)) {
                ensure_kind(
                    &error,
                    &kinds,
                    &format!("address with byte {byte} changed by ^ {mask:#04x}"),
                )?;
            }
        }
        connect(address).map_err(|e| {
            Failure::from(e).within("connect to the correct address after malformed addresses")
        })?;
        me.barrier()
    })
}

/// Drops an engine with ops behind a blocked wait. The regions are dropped right after it.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn dropping_an_engine_with_a_blocked_wait_returns<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let bytes = aligned(&me.caps, 1000);
        for _ in 0..5 {
            let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
            let flags = me.flags(1)?;
            let to = (&landing.remote[me.rank_after(1)], 0);
            let ops = [wait(&flags.local, 0, 1), put(to, (&source.local, 0), bytes)];
            let mut engine = me.fabric.engine(Default::default())?;
            let slice_ops_max = engine.caps().slice_ops_max;
            for slice in ops.chunks(slice_ops_max) {
                // SAFETY: the regions outlive the engine, which is dropped below.
                match unsafe { engine.submit(slice) } {
                    Err(error) if error.kind() == ErrorKind::QueueFull => break,
                    answer => drop(answer?),
                }
            }
            let start = Instant::now();
            drop(engine);
            let took = start.elapsed();
            let limit = me.harness.timeout();
            ensure!(
                took < limit,
                "the drop of the engine took {took:?}, expected less than {limit:?}"
            );
            me.barrier()?;
        }
        Ok(())
    })
}

/// Drops engines whose copies may be in flight. Afterwards nothing may be written here, and nothing may be read for a peer.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_dropped_engine_touches_no_memory<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let mut other = me.engine()?;
        ensure_ends_with_its_copies(
            me,
            |me, copies| {
                let mut engine = me.fabric.engine(Default::default())?;
                for copy in copies {
                    // SAFETY: the regions outlive the engine, which is dropped below.
                    match unsafe { engine.submit(&[*copy]) } {
                        Err(error) if error.kind() == ErrorKind::QueueFull => break,
                        answer => drop(answer?),
                    }
                }
                drop(engine);
                Ok(())
            },
            || other.watch(QUIET, |_| Ok(())),
        )
    })
}

/// The number of copies that are submitted before the engine ends, more than the host backend makes in one call.
const COPIES: usize = 48;

/// Lets `end` submit copies to an engine and end the engine, first to this rank and then to the next one. `watch` polls what is
/// left. Copies to this rank must not be written any more, and those to the next rank must not read what is overwritten here.
pub(super) fn ensure_ends_with_its_copies<'w, H: Harness>(
    me: &mut Participant<'w, H>,
    mut end: impl for<'r> FnMut(&mut Participant<'w, H>, &[OpOf<'r, H>]) -> Outcome,
    mut watch: impl FnMut() -> Outcome,
) -> Outcome {
    let bytes = aligned(&me.caps, 300_000);
    let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
    let sent = |rank| pattern(seed(rank, 0), bytes);
    me.write(&source.local, 0, &sent(me.me));
    let (here, next) = (me.me, me.rank_after(1));
    end(me, &[put((&landing.remote[here], 0), (&source.local, 0), bytes); COPIES])?;
    me.poison(&landing.local, 0..bytes);
    watch()?;
    me.ensure_poison("a region that the engine was copying to", &landing.local, 0..bytes)?;
    me.barrier()?;
    if next == here {
        return Ok(());
    }
    end(me, &[put((&landing.remote[next], 0), (&source.local, 0), bytes); COPIES])?;
    let others: Vec<u8> = sent(here).iter().map(|byte| !byte).collect();
    me.write(&source.local, 0, &others);
    me.barrier()?;
    watch()?;
    let seen = me.read(&landing.local, 0, bytes);
    let from = me.rank_after(me.ranks - 1);
    let expected = sent(from);
    for (at, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
        ensure!(
            [&POISON, expected].contains(&seen),
            "byte {at} that rank {from} was sending is {seen:#04x}, which was written to the source after the engine had ended"
        );
    }
    me.barrier()
}
