//! Checks contract 15: commands.

use peerlane_hal::{
    BoundRegions, Caps, Command, Commands, CopyEngine, DType, Direction, DynEngine, DynError,
    DynFabric, DynImport, Error, ErrorKind, FlagValues, Operator, Rank, Reduction, RegionFlag,
    RegionOffset, Regions, Rows, StartValues, Ticket,
};

use crate::data::{aligned, pattern, seed};
use crate::engine::TestEngine;
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::Harness;
use crate::ranks::{Participant, Window, on_each, on_ranks};

const FLAGS: u32 = 0;
const SOURCE: u32 = 1;
const LANDING: u32 = 3;
/// A number that no region has.
const NONE: u32 = 2;

/// Returns a put from the beginning of a region of this rank to the beginning of a region of a
/// peer.
fn put(peer: usize, (remote, local): (u32, u32), bytes: u64) -> Command {
    Command::Copy {
        direction: Direction::Put,
        peer: Rank::at(peer),
        remote: RegionOffset { region: remote, offset: 0 },
        local: RegionOffset { region: local, offset: 0 },
        bytes,
        rows: Rows::ONE,
    }
}

/// Submits a slice as soon as the queue has room.
fn submit<H: Harness<Fabric = DynFabric>>(
    engine: &mut TestEngine<'_, '_, H>,
    regions: &BoundRegions,
    commands: Commands<'_>,
    start: &StartValues<'_>,
) -> Outcome<Ticket> {
    let time_limit = engine.time_limit("room for commands");
    loop {
        // SAFETY: the checks keep the regions longer than the engine, and the other rules of
        // `submit`.
        match unsafe { engine.inner.submit_commands(regions, commands, start) } {
            Err(error) if error.kind() == ErrorKind::QueueFull => {
                let done = engine.completed()?;
                time_limit.check(|| format!("{error}, completed {}", done.0))?;
            }
            answer => return answer.map_err(|e| Failure::from(e).within("submit commands")),
        }
    }
}

/// Binds flags, source and landing region of all ranks. Commands see the landing region from
/// `begin` on.
fn bind<H: Harness<Fabric = DynFabric>>(
    engine: &DynEngine,
    flags: &Window<H>,
    source: &Window<H>,
    landing: &Window<H>,
    begin: u64,
) -> Outcome<BoundRegions> {
    let mut regions = Regions::default();
    for (number, window, begin) in
        [(FLAGS, flags, 0), (SOURCE, source, 0), (LANDING, landing, begin)]
    {
        regions.set_local(number, window.local.clone(), begin);
        for (peer, import) in window.remote.iter().enumerate() {
            let import: &DynImport = import;
            regions.set_remote(number, Rank::at(peer), import.clone(), begin);
        }
    }
    engine.bind(&regions).map_err(|e| Failure::from(e).within("bind regions"))
}

/// Returns the commands of one rank, which every start of the check runs, and the bytes that it
/// puts.
fn commands(caps: &Caps, (to, reduces): (usize, bool), block: u64) -> Vec<Command> {
    let flag = |peer, lag| RegionFlag { region: FLAGS, word: 1, peer: Rank::at(peer), lag };
    let mut commands = Vec::new();

    // The flag that the last start has signalled, which is another one than that of this start.
    if caps.queued_wait {
        commands.push(Command::Wait { flag: flag(to, 1) });
    }
    if reduces {
        let (dst, reduction) = (RegionOffset { region: SOURCE, offset: 0 }, sum());
        commands.push(Command::Reduce { dst, first: 1, count: 2, bytes: block, reduction });
    }
    commands.push(put(to, (LANDING, SOURCE), block));
    // A command of no bytes is passed over, even if its region is not bound.
    commands.push(put(to, (NONE, SOURCE), 0));
    if reduces {
        let (dst, reduction) = (RegionOffset { region: NONE, offset: 0 }, sum());
        commands.push(Command::Reduce { dst, first: 0, count: 1, bytes: 0, reduction });
    }
    commands.push(Command::Signal { flag: flag(to, 0) });
    commands
}

fn sum() -> Reduction {
    Reduction::new(Operator::Max, DType::U8).expect("bytes have a largest one")
}

/// Runs the same commands in several starts, whose places, flags and values differ.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_command_runs_like_its_op<H: Harness<Fabric = DynFabric>>(harness: &H) -> Outcome {
    on_each(harness, [1, 2, 3], |me| {
        let block = aligned(&me.caps, 96).next_multiple_of(8);
        let (source, landing) = (me.bytes(8 * block)?, me.bytes(8 * block)?);
        let flags = me.flags(4)?;
        let mut engine = me.engine()?;
        let reduces = engine.inner.prepare_reduce()?.is_some();
        let bound = bind(&engine.inner, &flags, &source, &landing, block)?;

        let (to, from) = (me.rank_after(1), me.rank_after(me.ranks - 1));
        let commands = commands(&me.caps, (to, reduces), block);
        let sources = [0, 3, 4].map(|at| RegionOffset { region: SOURCE, offset: at * block });
        let mut value_before = 0;
        let ranks = me.ranks as u64;
        for epoch in 1..=6 {
            let set = epoch % 2;
            let value = 100 * epoch;
            let tags: Vec<u64> = (0..ranks).map(|rank| epoch + rank).collect();
            let values = StartValues {
                offsets: &[0, 2 * set * block, 0, 3 * set * block],
                flags: [
                    FlagValues { word: set, value },
                    FlagValues { word: 1 - set, value: value_before },
                ],
                tags: &tags,
                reset: false,
            };
            value_before = value;

            let sent = |rank| pattern(seed(rank, epoch), block);
            let first = if reduces { 3 } else { 0 };
            me.write(&source.local, (2 * set + first) * block, &sent(me.me));
            if reduces {
                me.write(&source.local, (2 * set + 4) * block, &vec![0; block as usize]);
            }
            me.poison(&landing.local, 0..8 * block);
            me.barrier()?;

            for commands in commands.chunks(me.caps.slice_ops_max) {
                submit(&mut engine, &bound, Commands { commands, sources: &sources }, &values)?;
            }

            let expected = value + tags[me.me];
            engine.wait_for_flag(&flags.local, 1 + set, expected)?;
            let found = me.flag_value(&flags.local, 1 + set)?;
            ensure!(found == expected, "the flag is {found}, expected {expected}");

            let at = block + 3 * set * block;
            me.ensure_bytes(
                &format!("the bytes of start {epoch}"),
                &landing.local,
                at,
                &sent(from),
            )?;
            me.ensure_poison("the bytes before", &landing.local, 0..at)?;
            me.ensure_poison("the bytes behind", &landing.local, at + block..8 * block)?;
            let last = engine.submit(&[])?;
            engine.finish(last)?;
            me.barrier()?;
        }
        Ok(())
    })
}

/// Submits slices with a command that names a region which is not bound, or sources that its slice
/// does not have.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_command_that_names_no_bound_region_is_refused<H: Harness<Fabric = DynFabric>>(
    harness: &H,
) -> Outcome {
    on_ranks(harness, 1, |me: &mut Participant<'_, H>| {
        let block = aligned(&me.caps, 16);
        let (source, landing) = (me.bytes(2 * block)?, me.bytes(2 * block)?);
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        let bound = bind(&engine.inner, &flags, &source, &landing, 0)?;

        let place = |region| RegionOffset { region, offset: 0 };
        let copy = |peer, remote, local| put(peer, (remote, local), block);
        let flag = RegionFlag { region: NONE, word: 0, peer: Rank(0), lag: 0 };
        let reduction = sum();
        let wrong = [
            ("of this rank", copy(0, LANDING, NONE)),
            ("of rank 0", copy(0, NONE, SOURCE)),
            ("of rank 1", copy(1, LANDING, SOURCE)),
            ("of rank 0", Command::Signal { flag }),
            ("of this rank", Command::Wait { flag }),
            (
                "sources",
                Command::Reduce { dst: place(SOURCE), first: 1, count: 1, bytes: 8, reduction },
            ),
        ];
        let values = StartValues {
            offsets: &[],
            flags: [FlagValues::default(); 2],
            tags: &[],
            reset: false,
        };
        let before = engine.submit(&[])?;
        for (what, command) in wrong {
            let slice = [copy(0, LANDING, SOURCE), command];
            let slice = &slice[2 - me.caps.slice_ops_max.min(2)..];
            let commands = Commands { commands: slice, sources: &[place(SOURCE)] };

            // SAFETY: the regions live longer than the engine, and nothing is submitted.
            let answer = unsafe { engine.inner.submit_commands(&bound, commands, &values) };
            let is_named = |error: &DynError| error.to_string().contains(what);
            ensure!(
                answer
                    .as_ref()
                    .is_err_and(|e| e.kind() == ErrorKind::InvalidArgument && is_named(e)),
                "{command:?}: submit_commands returned {answer:?}, expected an error that names the region {what}"
            );
        }

        let after = engine.submit(&[])?;
        ensure!(
            after.0 == before.0 + 1,
            "a slice was refused, but it took ticket {}",
            before.0 + 1
        );
        engine.finish(after)?;
        me.ensure_poison("the destination of the slices", &landing.local, 0..2 * block)?;
        Ok(())
    })
}
