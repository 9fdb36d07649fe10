//! Goes on after the loss of a rank: the others form a smaller group, agree on the last step that
//! all of them have kept, and repeat from there.
//!
//! `cargo run --bin recover`; the program starts itself once more for each rank.

use std::collections::VecDeque;
use std::env;
use std::error::Error;
use std::process::{self, Command};
use std::time::Duration;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane::{Backend, Deadline, ErrorKind, Group, OpenOptions, Rank};

const RANKS: usize = 4;
const LEN: usize = 10_000;
const STEPS: u64 = 20;

/// The rank that is lost, and the step in which that happens.
const LOST: Rank = Rank(2);
const LOSS: u64 = 11;

/// A rank can be one step ahead of another one, so each keeps the results of two steps.
const KEPT: usize = 2;
const START_TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    if let [hub, rank] = &env::args().skip(1).collect::<Vec<_>>()[..] {
        let environment = Environment::at_hub(hub, Rank(rank.parse()?), RANKS);
        let bootstrap = TcpBootstrap::join(&environment, Deadline::after(START_TIMEOUT))?;
        return train(OpenOptions::default().backend(Backend::Host).open(bootstrap)?);
    }

    let hub = Hub::bind("127.0.0.1:0", RANKS)?;
    let mut children = Vec::new();
    for rank in 0..RANKS {
        let arguments = [hub.address().to_string(), rank.to_string()];
        children.push(Command::new(env::current_exe()?).args(arguments).spawn()?);
    }

    for (rank, child) in children.iter_mut().enumerate() {
        let is_lost = rank == LOST.index();
        assert_eq!(child.wait()?.success(), !is_lost, "rank {rank}");
    }
    println!("{} of {RANKS} ranks have made all {STEPS} steps", RANKS - 1);
    Ok(())
}

/// A step that was made, with the state after it.
#[derive(Clone)]
struct Checkpoint {
    step: u64,
    state: Vec<f32>,
}

fn train(mut group: Group) -> Result<(), Box<dyn Error>> {
    let mut kept = VecDeque::from([Checkpoint { step: 0, state: vec![0.0; LEN] }]);
    let mut common_step = STEPS;
    loop {
        match make_steps(&mut group, &mut kept) {
            Ok(()) => break,
            Err(error) if error.kind() == ErrorKind::PeerLost => {
                let ranks = group.ranks();
                eprintln!("rank {}: {error}", group.rank());

                // All ranks but the lost one call this. The old group ends with its memory.
                group = group.shrink()?;
                common_step = go_back(&mut group, &mut kept)?;
                assert_eq!(group.ranks(), ranks - 1);
            }
            Err(error) => return Err(error.into()),
        }
    }

    // The lost rank has made all steps before the loss. Another rank may have learned of the loss before it had completed the
    // last of them, which is then repeated.
    assert!((LOSS - KEPT as u64..LOSS).contains(&common_step), "step {common_step}");

    // The steps that all have kept have the sum of four ranks, and the others that of three.
    let sum = common_step * RANKS as u64 + (STEPS - common_step) * (RANKS as u64 - 1);
    assert_eq!(kept[kept.len() - 1].state, vec![sum as f32; LEN]);
    Ok(group.close()?)
}

/// Makes all steps that are left, and keeps the results of the last ones.
fn make_steps(group: &mut Group, kept: &mut VecDeque<Checkpoint>) -> Result<(), peerlane::Error> {
    let mut add = group.all_reduce::<f32>(LEN).prepare()?;
    let Checkpoint { mut step, mut state } = kept.back().expect("a step is kept").clone();

    while step < STEPS {
        if step + 1 == LOSS && group.rank() == LOST && group.ranks() == RANKS {
            process::exit(1); // As a crash would.
        }

        add.input_mut()?.fill(1.0);
        add.run()?;
        state.iter_mut().zip(add.output()?).for_each(|(state, sum)| *state += sum);
        step += 1;
        kept.push_back(Checkpoint { step, state: state.clone() });
        kept.drain(..kept.len().saturating_sub(KEPT));
    }
    Ok(())
}

/// Drops the steps that not all ranks of the group have made, and returns the last one that all have.
fn go_back(group: &mut Group, kept: &mut VecDeque<Checkpoint>) -> Result<u64, Box<dyn Error>> {
    let newest = kept.back().expect("a step is kept").step;
    let steps = group.exchange(&newest.to_le_bytes())?;
    let steps = steps.into_iter().map(|step| step.try_into().map(u64::from_le_bytes));
    let common = steps.collect::<Result<Vec<_>, _>>().map_err(|_| "a step has 8 bytes")?;

    let point = common.into_iter().min().expect("the group has ranks");
    kept.retain(|checkpoint| checkpoint.step <= point);
    match kept.back() {
        Some(checkpoint) if checkpoint.step == point => Ok(point),
        _ => Err(format!("step {point} is no longer kept").into()),
    }
}
