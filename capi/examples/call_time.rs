//! Prints the median time of an immediate all-gather of 8 bytes on one rank, in nanoseconds, to
//! compare with call_time.c: of memory of the program, or with the argument `window` of parts of a
//! window.

use std::time::Instant;

use peerlane::collective::Collective;
use peerlane::{Backend, DType, Error, OpenOptions};

const ROUNDS: usize = 101;
const CALLS: u32 = 5000;

fn main() -> Result<(), Error> {
    let in_window = std::env::args().nth(1).as_deref() == Some("window");
    let mut group = OpenOptions::default().backend(Backend::Host).from_env()?;
    let window = group.window::<u8>(16)?;
    let input = [1_u8; 8];
    let mut output = [0_u8; 8];

    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for _ in 0..CALLS {
            let call = group.immediate(Collective::AllGather);
            if in_window {
                let part = window.untyped_part(DType::U8, 0, 8)?;
                call.run(part, window.untyped_part(DType::U8, 8, 8)?)?;
            } else {
                call.run(&input, &mut output)?;
            }
        }
        times.push(begin.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
    }

    times.sort_by(f64::total_cmp);
    println!("{:.1}", times[ROUNDS / 2]);
    group.release(window).map_err(|unreleased| unreleased.error)?;
    group.close()
}
