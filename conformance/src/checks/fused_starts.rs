//! Checks contract 17: fused starts.

use std::time::Duration;

use peerlane_hal::{
    At, CopyEngine as _, EngineRequirements, Error as _, ErrorKind, Fabric as _, Flag, FusedOps,
    SLOT_FACTOR, Ticket,
};

use crate::data::{pattern, seed};
use crate::engine::{OpOf, TestEngine, put, signal, wait};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{ErrorOf, Harness, LocalOf};
use crate::ranks::{Participant, Window, on_each, on_ranks};

/// The number of starts of each program.
const STARTS: u64 = 6;
/// The distance of the blocks of two ranks in the tests.
const STRIDE: u64 = 96 << 10;

/// Creates an engine for fused starts with so many blocks.
fn engine<'r, 'w, H: Harness>(
    me: &mut Participant<'w, H>,
    blocks: u32,
) -> Outcome<Result<TestEngine<'r, 'w, H>, ErrorOf<H>>> {
    let offers = me.fabric.offers().map_err(|e| Failure::from(e).within("offers"))?;
    let offer = offers.iter().find(|offer| offer.fused.is_some());
    let kind = offer.map(|offer| offer.kind());
    let requirements = EngineRequirements { kind, fused_blocks: blocks, ..Default::default() };
    Ok(me.fabric.engine(requirements).map(|inner| me.drive(inner)))
}

/// The flags of a rank, for each rank and each set, with a word for each block.
struct Flags {
    blocks: u32,
    ranks: usize,
}

impl Flags {
    /// Returns the number of all words. The last two count the starts.
    fn words(&self) -> u64 {
        self.word(2, 0, 0) + 2
    }

    /// Returns the first word of the flag of `kind` that `rank` signals in even or odd starts.
    fn word(&self, kind: u64, rank: usize, parity: u64) -> u64 {
        let flags = (kind * self.ranks as u64 + rank as u64) * 2 + parity;
        flags * u64::from(self.blocks)
    }
}

/// The memory of an all-gather on one rank.
struct Memory<H: Harness> {
    source: Window<H>,
    output: Window<H>,
    slots: Window<H>,
    flags: Window<H>,
}

impl<H: Harness> Memory<H> {
    fn new(me: &mut Participant<'_, H>, flags: &Flags) -> Outcome<Self> {
        let all = STRIDE * me.ranks as u64;
        Ok(Self {
            source: me.bytes(STRIDE)?,
            output: me.bytes(2 * all)?,
            slots: me.bytes(2 * SLOT_FACTOR * all)?,
            flags: me.flags(flags.words())?,
        })
    }
}

/// Returns the flag from which on the device counts the starts.
fn counter<'r, H: Harness>(memory: &'r Memory<H>, flags: &Flags) -> Flag<'r, LocalOf<H>> {
    Flag { region: &memory.flags.local, word: flags.words() - 2 }
}

/// Returns the value of flags in the first even or the first odd start.
fn first(parity: u64) -> u64 {
    2 - parity
}

/// Returns the ops of an all-gather in even or odd starts, each into an output of its own.
fn gather<'r, H: Harness>(
    me: &Participant<'_, H>,
    memory: &'r Memory<H>,
    flags: &Flags,
    parity: u64,
    bytes: u64,
) -> Vec<OpOf<'r, H>> {
    let Memory { source, output, flags: words, .. } = memory;
    let peers = || me.peers();
    let place = parity * STRIDE * me.ranks as u64 + STRIDE * me.me as u64;
    let [ready, arrived] = [0, 1];
    let signals = |kind| {
        let word = flags.word(kind, me.me, parity);
        peers().map(move |peer| signal(&words.remote[peer], word, first(parity)))
    };
    let waits = |kind| {
        let word = move |peer| flags.word(kind, peer, parity);
        peers().map(move |peer| wait(&words.local, word(peer), first(parity)))
    };

    let mut ops: Vec<OpOf<'r, H>> = signals(ready).chain(waits(ready)).collect();
    let puts =
        (0..me.ranks).map(|peer| put((&output.remote[peer], place), (&source.local, 0), bytes));
    ops.extend(puts);
    ops.extend(signals(arrived).chain(waits(arrived)));
    ops
}

/// Returns the ops of an all-gather of tagged data.
fn tagged_gather<'r, H: Harness>(
    me: &Participant<'_, H>,
    memory: &'r Memory<H>,
    flags: &Flags,
    parity: u64,
    bytes: u64,
) -> Vec<OpOf<'r, H>> {
    let Memory { source, output, slots, flags: words } = memory;
    let peers = || me.peers();
    let all = STRIDE * me.ranks as u64;
    let place = |rank: usize| parity * all + STRIDE * rank as u64;
    let slot = |rank: usize| SLOT_FACTOR * place(rank);

    let mut ops: Vec<OpOf<'r, H>> = peers()
        .map(|peer| put((&slots.remote[peer], slot(me.me)), (&source.local, 0), bytes))
        .collect();
    ops.push(put((&output.remote[me.me], place(me.me)), (&source.local, 0), bytes));
    // A rank has ended a start before it begins the next one, which frees the slots of the former.
    let [began, arrived] = [0, 1].map(|kind| move |rank, of| flags.word(kind, rank, of));
    let last = |peer| wait(&words.local, began(peer, 1 - parity), first(parity) - 1);
    ops.splice(0..0, peers().map(last));
    for word in [began, arrived] {
        let flag = word(me.me, parity);
        ops.extend(peers().map(|peer| signal(&words.remote[peer], flag, first(parity))));
    }
    ops.extend(peers().map(|peer| wait(&words.local, arrived(peer, parity), first(parity))));
    ops.extend(
        peers().map(|peer| {
            put((&output.remote[me.me], place(peer)), (&slots.local, slot(peer)), bytes)
        }),
    );
    ops
}

/// Starts what the engine has compiled.
fn start<H: Harness>(engine: &mut TestEngine<'_, '_, H>) -> Outcome<Ticket> {
    start_with(engine, 0)?.map_err(|e| Failure::from(e).within("start"))
}

fn start_with<H: Harness>(
    engine: &mut TestEngine<'_, '_, H>,
    digest: u64,
) -> Outcome<Result<Ticket, ErrorOf<H>>> {
    let Some(fused) = engine.inner.fused() else {
        return Err(Failure::new("the engine has no fused starts, although they are offered"));
    };
    // SAFETY: the regions outlive the engine, whose drop waits for the last start. Each flag has
    // one writer and one reader, and no rank writes what a start still uses.
    Ok(unsafe { fused.start(0, digest) })
}

fn compile<'r, H: Harness>(
    engine: &mut TestEngine<'r, '_, H>,
    ops: &FusedOps<'_, LocalOf<H>, crate::harness::RemoteOf<H>>,
) -> Outcome<Result<(), ErrorOf<H>>> {
    let Some(fused) = engine.inner.fused() else {
        return Err(Failure::new("the engine has no fused starts, although they are offered"));
    };
    Ok(fused.compile(ops).map(|_| ()))
}

/// Runs all-gathers of several lengths, with and without tags, and compares all bytes.
fn gathers<H: Harness>(me: &mut Participant<'_, H>, is_tagged: bool) -> Outcome {
    for (blocks, bytes) in [(1, 1), (2, 4099), (4, 65_537)] {
        let flags = Flags { blocks, ranks: me.ranks };
        let memory = Memory::new(me, &flags)?;
        let all = STRIDE * me.ranks as u64;

        let of = if is_tagged { tagged_gather } else { gather };
        let ops = [0, 1].map(|parity| of(me, &memory, &flags, parity, bytes));
        let slots = is_tagged
            .then(|| (At { region: &memory.slots.local, offset: 0 }, 2 * SLOT_FACTOR * all));
        let ops = FusedOps {
            ops: [&ops[0], &ops[1]],
            slots,
            counter: counter(&memory, &flags),
            blocks,
            base: 0,
            digest_bits: 0,
        };
        let mut engine = engine(me, blocks)??;
        compile(&mut engine, &ops)??;
        me.barrier()?;

        for round in 1..=STARTS {
            me.write(&memory.source.local, 0, &pattern(seed(me.me, round), bytes));
            me.poison(&memory.output.local, 0..2 * all);
            // Otherwise a peer could write before the poison.
            me.barrier()?;
            let ticket = start(&mut engine)?;
            engine.finish(ticket)?;

            let parity = round % 2;
            for peer in 0..me.ranks {
                let place = parity * all + STRIDE * peer as u64;
                let what = format!("start {round}, {bytes} bytes of rank {peer}, {blocks} blocks");
                let expected = pattern(seed(peer, round), bytes);
                me.ensure_bytes(&what, &memory.output.local, place, &expected)?;
                me.ensure_poison(&what, &memory.output.local, place + bytes..place + STRIDE)?;
            }
            me.barrier()?;
        }

        let progress = engine.inner.fused().map(|fused| fused.progress());
        let Some(Ok(progress)) = progress else {
            return Err(Failure::new("the engine does not tell how far its starts have come"));
        };
        let found = progress();
        ensure!(
            (found.begun, found.done) == (STARTS, STARTS),
            "the engine has begun {} and ended {} starts, expected {STARTS}",
            found.begun,
            found.done
        );
    }
    Ok(())
}

/// Gathers the blocks of two and three ranks in fused starts, with other data in each.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_fused_start_has_the_effects_of_its_ops<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 2..=3, |me| gathers(me, false))
}

/// Gathers what ops before a start have copied, when they have waited for each other, and copies
/// the result behind it.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn ops_and_fused_starts_take_effect_in_their_order<H: Harness>(harness: &H) -> Outcome {
    const BYTES: u64 = 20_000;
    on_ranks(harness, 2, |me| {
        let flags = Flags { blocks: 2, ranks: me.ranks };
        let memory = Memory::new(me, &flags)?;
        let all = STRIDE * me.ranks as u64;
        let (given, result) = (me.bytes(BYTES)?, me.bytes(2 * all)?);
        let entered = me.flags(me.ranks as u64)?;

        let [even, odd] = [0, 1].map(|parity| gather(me, &memory, &flags, parity, BYTES));
        let counter = counter(&memory, &flags);
        let (slots, digest_bits) = (None, 0);
        let ops = FusedOps { ops: [&even, &odd], slots, counter, blocks: 2, base: 0, digest_bits };
        let mut engine = engine(me, 2)??;
        compile(&mut engine, &ops)??;
        me.barrier()?;

        for round in 1..=STARTS {
            me.write(&given.local, 0, &pattern(seed(me.me, round), BYTES));
            me.poison(&memory.source.local, 0..BYTES);
            me.poison(&memory.output.local, 0..2 * all);
            me.poison(&result.local, 0..2 * all);
            me.barrier()?;

            let (own, peer) = (me.me, 1 - me.me);
            let last = engine.submit(&[
                signal(&entered.remote[peer], own as u64, round),
                wait(&entered.local, peer as u64, round),
                put((&memory.source.remote[own], 0), (&given.local, 0), BYTES),
            ])?;
            let started = start(&mut engine)?;
            ensure!(started > last, "the ticket of a start is not behind that of the ops before");
            let copied = put((&result.remote[own], 0), (&memory.output.local, 0), 2 * all);
            let ticket = engine.submit(&[copied])?;
            engine.finish(ticket)?;

            for rank in 0..me.ranks {
                let place = round % 2 * all + STRIDE * rank as u64;
                let expected = pattern(seed(rank, round), BYTES);
                let what = format!("start {round}, copy of the block of rank {rank}");
                me.ensure_bytes(&what, &result.local, place, &expected)?;
            }
            me.barrier()?;
        }
        Ok(())
    })
}

/// Gathers the blocks of two and three ranks as tagged data.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn tagged_data_is_read_when_it_has_arrived<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 2..=3, |me| gathers(me, true))
}

/// Releases an engine whose starts wait for flags that nobody signals.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_release_ends_fused_starts_that_wait<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let flags = Flags { blocks: 2, ranks: me.ranks };
        let words = me.flags(flags.words())?;
        let ops: [[OpOf<'_, H>; 1]; 2] =
            [0, 1].map(|parity| [wait(&words.local, flags.word(0, 0, parity), first(parity))]);
        let counter = Flag { region: &words.local, word: flags.words() - 2 };
        let ops = FusedOps {
            ops: [&ops[0], &ops[1]],
            slots: None,
            counter,
            blocks: 2,
            base: 0,
            digest_bits: 0,
        };
        let mut engine = engine(me, 2)??;
        compile(&mut engine, &ops)??;

        let mut last = Ticket::NONE;
        for _ in 0..20 {
            last = start(&mut engine)?;
        }
        engine.watch(Duration::from_millis(20), |done| {
            ensure!(done == Ticket::NONE, "a start ended without its signal");
            Ok(())
        })?;

        let time_limit = engine.time_limit("released starts to end");
        while engine.completed()? < last {
            engine.inner.release().map_err(|e| Failure::from(e).within("release"))?;
            time_limit.check(|| "some have not ended".to_owned())?;
        }
        Ok(())
    })
}

/// Replaces an all-gather by a shorter one, between starts.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_program_can_be_replaced_between_starts<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        let flags = Flags { blocks: 2, ranks: me.ranks };
        let memory = Memory::new(me, &flags)?;
        let counter = counter(&memory, &flags);
        let of_bytes = |bytes| [0, 1].map(|parity| gather(me, &memory, &flags, parity, bytes));
        let lengths = [5000, 300, 0, 70_000];
        let all = lengths.map(of_bytes);
        let mut engine = engine(me, 2)??;

        for (round, (bytes, [even, odd])) in (1..).zip(lengths.into_iter().zip(&all)) {
            let ops = FusedOps {
                ops: [even, odd],
                slots: None,
                counter,
                blocks: 2,
                base: 0,
                digest_bits: 0,
            };
            if round == 1 {
                compile(&mut engine, &ops)??;
            } else {
                replace(&mut engine, 0, &ops)??;
                let other = FusedOps { blocks: 1, ..ops };
                ensure!(replace(&mut engine, 0, &other)?.is_err(), "other blocks were taken");
            }
            ensure!(replace(&mut engine, 1, &ops)?.is_err(), "there is only one program");

            me.write(&memory.source.local, 0, &pattern(seed(me.me, round), STRIDE));
            me.poison(&memory.output.local, 0..2 * STRIDE * me.ranks as u64);
            me.barrier()?;
            let ticket = start(&mut engine)?;
            engine.finish(ticket)?;

            let begin = round % 2 * STRIDE * me.ranks as u64;
            for peer in 0..me.ranks {
                let place = begin + STRIDE * peer as u64;
                let what = format!("start {round}, {bytes} bytes of rank {peer}");
                let expected = pattern(seed(peer, round), bytes);
                me.ensure_bytes(&what, &memory.output.local, place, &expected)?;
                me.ensure_poison(&what, &memory.output.local, place + bytes..place + STRIDE)?;
            }
            me.barrier()?;
        }
        Ok(())
    })
}

fn replace<'r, H: Harness>(
    engine: &mut TestEngine<'r, '_, H>,
    program: usize,
    ops: &FusedOps<'_, LocalOf<H>, crate::harness::RemoteOf<H>>,
) -> Outcome<Result<(), ErrorOf<H>>> {
    let Some(fused) = engine.inner.fused() else {
        return Err(Failure::new("the engine has no fused starts, although they are offered"));
    };
    Ok(fused.replace(program, ops))
}

/// Signals between two ranks with digests, which waits ignore.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn signals_carry_the_digest_of_their_start<H: Harness>(harness: &H) -> Outcome {
    const BITS: u32 = 8;
    on_ranks(harness, 2, |me| {
        let flags = Flags { blocks: 2, ranks: me.ranks };
        let memory = Memory::new(me, &flags)?;
        let peer = 1 - me.me;
        let ops = [0, 1].map(|parity| {
            let value = first(parity) << BITS;
            let [to, from] = [me.me, peer].map(|rank| flags.word(0, rank, parity));
            let there = signal(&memory.flags.remote[peer], to, value);
            [there, wait(&memory.flags.local, from, value)]
        });
        let (slots, counter) = (None, counter(&memory, &flags));
        let [even, odd] = &ops;
        let ops =
            FusedOps { ops: [even, odd], slots, counter, blocks: 2, base: 0, digest_bits: BITS };
        let mut engine = engine(me, 2)??;
        compile(&mut engine, &ops)??;
        me.barrier()?;

        for round in 1..=STARTS {
            let refused = start_with(&mut engine, 1 << BITS)?;
            ensure!(refused.is_err(), "a digest of more than {BITS} bits was taken");
            // Each rank has another one, which differs from start to start.
            let digest = |rank: usize| 3 * round + rank as u64;
            let ticket = start_with(&mut engine, digest(me.me))?;
            engine.finish(ticket.map_err(|e| Failure::from(e).within("start"))?)?;

            for block in 0..2 {
                let word = flags.word(0, peer, round % 2) + block;
                let found = me.flag_value(&memory.flags.local, word)?;
                let expected = (round << BITS) + digest(peer);
                ensure!(
                    found == expected,
                    "start {round}: the flag of block {block} has the value {found}, expected \
                     {expected}"
                );
            }
            me.barrier()?;
        }
        Ok(())
    })
}

/// Compiles ops that no launch can run.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn ops_that_no_launch_runs_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        let flags = Flags { blocks: 2, ranks: me.ranks };
        let memory = Memory::new(me, &flags)?;
        let [even, odd] = [0, 1].map(|parity| gather(me, &memory, &flags, parity, 1000));
        let other = gather(me, &memory, &flags, 1, 999);
        // The word of the last block is behind the region.
        let last = flags.words() - 1;
        let outside = [0, 1].map(|parity| [signal(&memory.flags.remote[0], last, first(parity))]);
        let flag = |value| [signal(&memory.flags.remote[0], 0, value)];
        let [late, later] = [flag(3), flag(4)];
        let beyond = (At { region: &memory.slots.local, offset: 0 }, u64::MAX);

        let counter = counter(&memory, &flags);
        type Ops<'o, 'r, H> = FusedOps<'o, LocalOf<H>, crate::harness::RemoteOf<H>>;
        let cases: [(&str, Ops<'_, '_, H>); 6] = [
            (
                "other lengths in odd starts",
                FusedOps {
                    ops: [&even, &other],
                    slots: None,
                    counter,
                    blocks: 2,
                    base: 0,
                    digest_bits: 0,
                },
            ),
            (
                "more ops in odd starts",
                FusedOps {
                    ops: [&even, &odd[1..]],
                    slots: None,
                    counter,
                    blocks: 2,
                    base: 0,
                    digest_bits: 0,
                },
            ),
            (
                "a flag outside",
                FusedOps {
                    ops: [&outside[0], &outside[1]],
                    slots: None,
                    counter,
                    blocks: 2,
                    base: 0,
                    digest_bits: 0,
                },
            ),
            (
                "flags of later starts",
                FusedOps {
                    ops: [&later, &late],
                    slots: None,
                    counter,
                    blocks: 2,
                    base: 0,
                    digest_bits: 0,
                },
            ),
            (
                "slots outside",
                FusedOps {
                    ops: [&even, &odd],
                    slots: Some(beyond),
                    counter,
                    blocks: 2,
                    base: 0,
                    digest_bits: 0,
                },
            ),
            (
                "other blocks",
                FusedOps {
                    ops: [&even, &odd],
                    slots: None,
                    counter,
                    blocks: 3,
                    base: 0,
                    digest_bits: 0,
                },
            ),
        ];
        let mut engine = engine(me, 2)??;
        for (what, ops) in &cases {
            match compile(&mut engine, ops)? {
                Ok(()) => return Err(Failure::new(format!("{what}: compiled, expected an error"))),
                Err(error) => {
                    let is_refusal =
                        matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Unavailable);
                    ensure!(is_refusal, "{what}: {error}, expected a refusal");
                }
            }
        }

        let ops = FusedOps {
            ops: [&even, &odd],
            slots: None,
            counter,
            blocks: 2,
            base: 0,
            digest_bits: 0,
        };
        compile(&mut engine, &ops)??;
        me.barrier()
    })
}

/// Asks for engines until the device has no room for further blocks.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn blocks_that_do_not_fit_on_the_device_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let offers = me.fabric.offers().map_err(|e| Failure::from(e).within("offers"))?;
        let offer = offers.iter().find(|offer| offer.fused.is_some());
        let Some((offer, limits)) = offer.and_then(|offer| Some((offer, offer.fused?))) else {
            return Err(Failure::new("no kind of engines has fused starts"));
        };

        let blocks = limits.blocks_max;
        let most = offer.resident_blocks_max / blocks;
        let mut engines = Vec::new();
        for number in 0..=most {
            match engine(me, blocks)? {
                Ok(engine) => engines.push(engine),
                Err(error) => {
                    ensure!(number > 0, "no engine with {blocks} blocks: {error}");
                    ensure!(
                        error.kind() == ErrorKind::Unavailable,
                        "{error}: expected Unavailable"
                    );
                }
            }
        }
        ensure!(
            engines.len() as u32 <= most,
            "{} engines have {blocks} blocks each, expected at most {most}",
            engines.len()
        );

        engines.pop();
        engine(me, blocks)??;
        let too_many = engine(me, limits.blocks_max + 1)?.map(|_| ());
        ensure!(too_many.is_err(), "an engine has more blocks than are offered");
        Ok(())
    })
}
