//! Runs random programs of puts, gets, signals and waits, and compares every byte with a model that runs them one by one.
//!
//! A rank writes only to its own part of the window of another, and writes there again when that rank has looked. So the
//! content of a part is known whenever its reader has waited for the signal.

use std::sync::Mutex;
use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Channel, CopyRange, Group, GroupOptions};
use peerlane_hal::Rank;
use peerlane_host as host;
use peerlane_tests::middleware::{Layer, Wrapped};

const PART: usize = 64;
const STEPS: i32 = 12;
/// Signal 0 announces data, or that it may be got; signal 1 that it was taken.
const GIVEN: usize = 0;
const TAKEN: usize = 1;

/// Runs the programs of all seeds on `ranks` ranks over engines of a layer; returns the first difference.
pub(crate) fn run<L: Layer<host::Fabric>>(
    layer: impl Fn(Rank) -> L + Sync,
    ranks: usize,
    seeds: std::ops::Range<u64>,
    timeout: Duration,
) -> Result<(), String> {
    // The other ranks only tell that they have lost the one that found it.
    let difference = Mutex::new(None);
    let ended = in_process::run(ranks, |bootstrap| {
        let rank = bootstrap.rank();
        let fabric = Wrapped::new(host::Fabric::open(rank, ranks)?, layer(rank));
        let mut group = GroupOptions::default().timeout(timeout).open(bootstrap, fabric)?;
        for seed in seeds.clone() {
            if let Err(found) = Program::new(&mut group, seed, timeout)?.run()? {
                difference.lock().unwrap().get_or_insert(found);
                return Ok(());
            }
        }
        group.close()
    });
    match difference.into_inner().unwrap() {
        Some(difference) => Err(difference),
        None => ended.map(drop).map_err(|error| error.to_string()),
    }
}

struct Program {
    me: Rank,
    seed: u64,
    timeout: Duration,
    random: fastrand::Rng,
    channel: Channel<i32>,
    /// What the window of each rank contains.
    model: Vec<Vec<i32>>,
}

impl Program {
    fn new(group: &mut Group, seed: u64, timeout: Duration) -> Result<Self, Error> {
        let (me, ranks) = (group.rank(), group.ranks());
        let len = PART * (ranks + 1);
        let window = group.window::<i32>(len)?;
        let channel = group.channel(&window, 2)?;
        let (random, model) = (fastrand::Rng::with_seed(seed), vec![vec![0; len]; ranks]);
        Ok(Self { me, seed, timeout, random, channel, model })
    }

    fn run(mut self) -> Result<Result<(), String>, Error> {
        for step in 0..STEPS {
            if let Err(difference) = self.step(step)? {
                return Ok(Err(difference));
            }
        }
        Ok(Ok(()))
    }

    fn step(&mut self, step: i32) -> Result<Result<(), String>, Error> {
        let Self { me, seed, timeout, random, channel, model } = self;
        let ranks = model.len() as u32;
        let (from, to) = (Rank(random.u32(..ranks)), Rank(random.u32(..ranks)));
        let begin = PART * (from.index() + 1);
        // Every byte of an element tells the element.
        let fresh = (1..=PART as i32).map(|i| (1000 * step + i + *seed as i32) % 255 + 1);
        let fresh: Vec<i32> = fresh.map(|byte| byte.wrapping_mul(0x0101_0101)).collect();
        model[from.index()][..PART].copy_from_slice(&fresh);
        let copy = |from, to, len| CopyRange { from, to: begin + to, len };
        let copies: Vec<CopyRange> = match random.u8(..3) {
            0 => vec![copy(0, 0, random.usize(..=PART))],
            1 => (0..random.usize(..8)).map(|i| copy(8 * i, 8 * (7 - i), 5)).collect(),
            _ => (0..8).map(|i| copy(i, 2 * i, 1)).collect(),
        };
        for copy in &copies {
            let source = model[from.index()][copy.from..][..copy.len].to_vec();
            model[to.index()][copy.to..][..copy.len].copy_from_slice(&source);
        }
        let is_get = random.bool();
        if *me == from {
            channel.write(0, &fresh)?;
            match copies[..] {
                _ if is_get => channel.signal(to, GIVEN)?,
                [CopyRange { from, to: begin, len }] => {
                    channel.put_signal(to, from..from + len, begin, GIVEN)?
                }
                _ => {
                    channel.puts(to, &copies)?;
                    channel.signal(to, GIVEN)?
                }
            };
        }
        let mut result = Ok(());
        if *me == to {
            channel.wait(from, GIVEN, *timeout)?;
            if is_get {
                channel.gets(from, &copies)?;
                channel.flush(*timeout)?;
            }
            let mut seen = [0; PART];
            channel.read(begin, &mut seen)?;
            let wanted = &model[me.index()][begin..begin + PART];
            if seen != *wanted {
                result = Err(format!(
                    "seed {seed}, step {step}, from rank {from} to rank {to}: found {seen:?}, expected {wanted:?}"
                ));
            }
            channel.signal(from, TAKEN)?;
        }
        if *me == from {
            channel.wait(to, TAKEN, *timeout)?;
            channel.flush(*timeout)?;
        }
        Ok(result)
    }
}
