//! Measures what an immediate call costs the host more than a start of the same prepared operation.
//!
//! Both use the same parts of one window, by turns. One rank has no other one to wait for, so a time
//! is that of the calls. On a stream, which is a thread here, they enqueue the start and return.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::collective::Collective;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Window};
use peerlane_host as host;
use peerlane_layers::{Stream, StreamLayer, Wrapped};

const LEN: usize = 16;
const ROUNDS: usize = 400;
const CALLS: usize = 50;

/// The median times of a call, of the prepared operation and of the immediate one.
struct Medians([Duration; 2]);

impl Medians {
    fn of_rounds(mut round: impl FnMut(usize) -> Result<Duration, Error>) -> Result<Self, Error> {
        let mut times = [Vec::new(), Vec::new()];
        for number in 0..2 * ROUNDS {
            times[number % 2].push(round(number % 2)? / CALLS as u32);
        }

        Ok(Self(times.map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2]
        })))
    }

    fn print(&self, what: &str) {
        let [prepared, immediate] = self.0.map(|time| time.as_secs_f64() * 1e6);
        let more = immediate - prepared;
        println!(
            "{what}: prepared {prepared:.3} us, immediate {immediate:.3} us, {more:.3} us more"
        );
    }
}

fn timed(mut call: impl FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
    let begun = Instant::now();
    (0..CALLS).try_for_each(|_| call())?;
    Ok(begun.elapsed())
}

fn on_host(group: &mut Group, window: &Window<u8>) -> Result<Medians, Error> {
    let gather = group.all_gather::<u8>(LEN).resizable().check_starts(true);
    let mut gather = gather.output_into(window, LEN).input_from(window, 0).prepare()?;
    Medians::of_rounds(|turn| match turn {
        0 => timed(|| gather.run()),
        _ => timed(|| {
            let (from, to) = (window.part(0..LEN)?, window.part(LEN..2 * LEN)?);
            group.immediate(Collective::AllGather).run(from, to)
        }),
    })
}

fn on_stream(group: &mut Group, window: &Window<u8>) -> Result<Medians, Error> {
    let gather = group.all_gather::<u8>(LEN).resizable().check_starts(true);
    let mut gather = gather.output_into(window, LEN).input_from(window, 0).prepare()?;
    let stream = Stream::new();
    Medians::of_rounds(|turn| {
        let time = match turn {
            0 => timed(|| gather.start_on(&stream).map(drop)),
            _ => timed(|| {
                let (from, to) = (window.part(0..LEN)?, window.part(LEN..2 * LEN)?);
                group.immediate(Collective::AllGather).run_on(&stream, from, to)
            }),
        };
        assert!(stream.is_idle_within(Duration::from_secs(10)), "the stream is blocked");
        time
    })
}

fn main() -> Result<(), Error> {
    in_process::run(1, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let window = group.window::<u8>(2 * LEN)?;
        on_host(&mut group, &window)?.print("on the host");
        group.close()
    })?;

    in_process::run(1, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, Wrapped::new(fabric, StreamLayer::default()))?;
        let window = group.window::<u8>(2 * LEN)?;
        on_stream(&mut group, &window)?.print("on a stream");
        group.close()
    })?;
    Ok(())
}
