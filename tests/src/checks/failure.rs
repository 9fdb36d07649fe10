//! Contract 8: failure.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{
    BackendId, CopyEngine, Deadline, Error, ErrorKind, Fabric, KEY_MAGIC, PeerMemory, Rank,
    RemoteKey, Role,
};

use crate::data::{aligned, pattern, seed};
use crate::driver::{put, wait};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{ErrorOf, Harness, KeyOf, LocalOf, RemoteOf};
use crate::world::{Participant, on_each, on_ranks};

/// Tells runs of the check of malformed keys apart, which go on at once in one process.
static SIZES: AtomicU8 = AtomicU8::new(0);

/// A malformed key or address may name a peer that does not answer; that is found out soon enough.
const ASKING: Duration = Duration::from_secs(1);

/// After the harness has broken the engine, every call that can fail does, with one kind.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn the_first_error_poisons_the_engine<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let bytes = aligned(&me.caps, 100);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let mut driver = me.engine()?;
        let op = [put((&landing.remote[0], 0), (&source.local, 0), bytes)];
        driver.run(&op)?;
        let wanted = me.harness.break_engine(&mut driver.engine);
        let wanted = wanted.ok_or_else(|| Failure::new("the harness did not break the engine"))?;
        for round in 1..=3 {
            let answers = [
                ("submit", driver.try_submit(&op).map(drop)),
                ("completed", driver.engine.completed().map(drop)),
                ("park", driver.engine.park(Duration::from_millis(1))),
                ("an empty submit", driver.try_submit(&[]).map(drop)),
                ("release", driver.engine.release()),
            ];
            for (call, answer) in answers {
                let kind = answer.map_err(|error| error.kind());
                ensure!(
                    kind == Err(wanted),
                    "{call}, call {round} after the error, answers {kind:?}, wanted {wanted:?}"
                );
            }
        }
        let mut other = me.engine()?;
        other.run(&op).map_err(|failure| failure.within("another engine after the error"))
    })
}

/// Truncations, flipped bits, trailing and random bytes. A flip that leaves a readable key is
/// refused by the import, or names the same registration and no more bytes of it.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn malformed_keys_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        // A size that no registration of other checks has: only the two ranks could be mistaken for
        // one another.
        let size = vec![SIZES.fetch_add(1, Ordering::Relaxed)];
        let steps = u64::from(me.exchange(size)?[0][0]);
        let region = me.allocate(aligned(&me.caps, 7919) + steps * 64, Role::Data)?;
        let key = me.fabric.memory().export(&region)?.encode();
        let keys = me.exchange(key)?;
        let key = &keys[1 - me.me];
        let own = KeyOf::<H>::decode(key)?;
        for end in 0..key.len() {
            undecodable::<H>(&key[..end], &format!("the first {end} of {} bytes", key.len()))?;
        }
        let longer = [&key[..], &[0]].concat();
        undecodable::<H>(&longer, "a key with a byte too many")?;
        for (field, span) in [("magic", 0..4), ("version", 4..6), ("backend", 6..8)] {
            for byte in span {
                let flipped = flip(key, byte, 0xFF);
                undecodable::<H>(&flipped, &format!("a key with a foreign {field}"))?;
            }
        }
        let foreign = BackendId(me.fabric.backend().0 ^ 0x4000).0.to_le_bytes();
        let stranger = [&KEY_MAGIC[..], &key[4..6], &foreign, &key[8..]].concat();
        undecodable::<H>(&stranger, "a key of another backend")?;
        for (byte, mask) in flips(key.len()) {
            let Ok(flipped) = KeyOf::<H>::decode(&flip(key, byte, mask)) else { continue };
            flipped_import(me, &flipped, &own, &format!("byte {byte} of the key ^ {mask:#04x}"))?;
        }
        random_bytes(|bytes| drop(KeyOf::<H>::decode(bytes)));
        me.meet()
    })
}

fn undecodable<H: Harness>(bytes: &[u8], what: &str) -> Outcome {
    match KeyOf::<H>::decode(bytes) {
        Ok(_) => Err(Failure::new(format!("{what} was taken for a key"))),
        Err(error) => {
            let kind = error.kind();
            ensure!(
                kind == ErrorKind::InvalidKey,
                "{what}: {error} ({kind}), wanted an invalid key"
            );
            Ok(())
        }
    }
}

fn flipped_import<H: Harness>(
    me: &Participant<'_, H>,
    flipped: &KeyOf<H>,
    own: &KeyOf<H>,
    what: &str,
) -> Outcome {
    let deadline = Deadline::after(ASKING.min(me.harness.timeout()));
    match me.fabric.memory().import(Rank::at(1 - me.me), flipped, deadline) {
        Ok(_) => {
            let (seen, wanted) = (flipped.generation(), own.generation());
            ensure!(seen == wanted, "{what}: it names registration {seen:?} and opens one");
            let (seen, wanted) = (flipped.region_bytes(), own.region_bytes());
            ensure!(seen <= wanted, "{what}: opened with {seen} bytes, the region has {wanted}");
            Ok(())
        }
        Err(error) => one_of(&error, &[ErrorKind::InvalidKey, ErrorKind::PeerLost], what),
    }
}

fn one_of<E: Error>(error: &E, wanted: &[ErrorKind], what: &str) -> Outcome {
    let kind = error.kind();
    ensure!(wanted.contains(&kind), "{what}: {error} ({kind}), wanted one of {wanted:?}");
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

/// Bytes of no form at all, and such that begin like a key.
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

/// Encoded, decoded and encoded again: the same bytes, size and generation, and it can be imported.
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
            ensure!(decoded.encode() == encoded, "a key of {bytes} bytes is encoded differently");
            let (seen, wanted) = (decoded.region_bytes(), key.region_bytes());
            ensure!(seen == wanted, "region_bytes is {seen} after decoding, {wanted} before");
            ensure!(wanted == bytes, "region_bytes is {wanted} for a region of {bytes}");
            let (seen, wanted) = (decoded.generation(), key.generation());
            ensure!(seen == wanted, "the generation is {seen:?} after decoding, {wanted:?} before");
            ensure!(!generations.contains(&seen), "{seen:?} names two registrations");
            generations.push(seen);
            drop(me.share(region)?);
            me.meet()?;
        }
        Ok(())
    })
}

/// By its owner and by a peer, for allocated and for own memory, and when the address is used again.
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
                // Good while the memory lives, and the import ends before it.
                drop(open(me, &keys)?);
                me.meet()?;
                drop(first);
                me.meet()?;
                refused_everywhere(me, &keys, "freed memory")?;
                let again: Option<LocalOf<H>> = make(me, own)?;
                me.meet()?;
                refused_everywhere(me, &keys, "freed memory, new memory in its place")?;
                me.meet()?;
                drop(again);
            }
        }
        me.meet()
    })
}

fn open<H: Harness>(me: &Participant<'_, H>, keys: &[Vec<u8>]) -> Outcome<Vec<RemoteOf<H>>> {
    let import = |(peer, key): (Rank, &Vec<u8>)| {
        let key = KeyOf::<H>::decode(key)?;
        Ok(me.fabric.memory().import(peer, &key, me.deadline())?)
    };
    Rank::all(me.ranks).zip(keys).map(import).collect()
}

fn refused_everywhere<H: Harness>(
    me: &Participant<'_, H>,
    keys: &[Vec<u8>],
    what: &str,
) -> Outcome {
    for (peer, key) in Rank::all(me.ranks).zip(keys) {
        let key = KeyOf::<H>::decode(key)?;
        let what = format!("a key of {what} of rank {peer}");
        match me.fabric.memory().import(peer, &key, me.deadline()) {
            Ok(_) => return Err(Failure::new(format!("{what} was imported"))),
            Err(error) => one_of(&error, &[ErrorKind::InvalidKey], &what)?,
        }
    }
    Ok(())
}

/// Truncations, trailing and random bytes, another rank's address, flipped bits. Afterwards the
/// right address still connects.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn malformed_addresses_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        let addresses = me.exchange(me.fabric.address())?;
        let (peer, address) = (Rank::at(1 - me.me), &addresses[1 - me.me]);
        // A fabric of its own, so that nothing that works is spoilt.
        let mut fabric = me.harness.open(me.rank(), 2)?;
        let mut connect = |address: &[u8]| {
            fabric.connect(peer, address, Deadline::after(ASKING.min(me.harness.timeout())))
        };
        let wrong = |what: &str, answer: Result<(), ErrorOf<H>>| match answer {
            Ok(()) => Err(Failure::new(format!("{what} was connected to"))),
            Err(error) => one_of(&error, &[ErrorKind::Mismatch], what),
        };
        for end in 0..address.len() {
            let what = format!("the first {end} of an address's {} bytes", address.len());
            wrong(&what, connect(&address[..end]))?;
        }
        wrong("an address with a byte too many", connect(&[&address[..], &[0]].concat()))?;
        wrong("another rank's address", connect(&addresses[me.me]))?;
        wrong("bytes of no form", connect(&pattern(seed(0, 9), address.len() as u64)))?;
        // A changed address may be one of form, of a rank elsewhere that is gone or out of reach.
        let kinds =
            [ErrorKind::Mismatch, ErrorKind::PeerLost, ErrorKind::Timeout, ErrorKind::Unavailable];
        for (byte, mask) in flips(address.len()) {
            if let Err(error) = connect(&flip(address, byte, mask)) {
                one_of(&error, &kinds, &format!("byte {byte} of the address ^ {mask:#04x}"))?;
            }
        }
        connect(address).map_err(|e| Failure::from(e).within("the right address at last"))?;
        me.meet()
    })
}

/// With ops behind the wait; the regions go right after the engine.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn dropping_an_engine_with_a_blocked_wait_returns<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let bytes = aligned(&me.caps, 1000);
        for _ in 0..5 {
            let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
            let flags = me.flags(1)?;
            let to = (&landing.remote[me.after(1)], 0);
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
            ensure!(took < limit, "the drop took {took:?}, wanted less than {limit:?}");
            me.meet()?;
        }
        Ok(())
    })
}
