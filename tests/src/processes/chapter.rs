//! Ranks that go through a chapter of cases: each says `passed CASE` after every one, and `done` at the
//! end. In between it may say `under way`, and a `figure` for people.

use std::time::Duration;

use peerlane_hal::Deadline;

use super::Child;
use crate::failure::{Failure, Outcome};

/// How much longer the others may take to notice that one has failed.
const ECHO: Duration = Duration::from_secs(30);

/// Hears the ranks out to their ends, `children[rank]` being a rank's process.
///
/// # Errors
/// What any of them says instead, or that one does not end well until the deadline; a line a rank.
pub fn hear_out(children: &mut [Child], mut deadline: Deadline) -> Outcome {
    let mut failures = Vec::new();
    for (rank, child) in children.iter_mut().enumerate() {
        if let Err(failure) = to_its_end(child, deadline).and_then(|()| child.finish(deadline)) {
            if failures.is_empty() {
                deadline = Deadline::after(deadline.remaining().min(ECHO));
            }
            failures.push(format!("rank {rank}: {failure}"));
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::new(failures.join("\n"))) }
}

fn to_its_end(child: &mut Child, deadline: Deadline) -> Outcome {
    let mut passed = String::from("nothing");
    loop {
        match child.hear(deadline) {
            Ok(line) if line == "done" => return Ok(()),
            Ok(line) if line == "under way" => {}
            Ok(line) if line.starts_with("figure ") => println!("{line}"),
            Ok(line) if line.starts_with("passed ") => passed = line,
            Ok(line) => return Err(Failure::new(line)),
            Err(failure) => return Err(failure.within(format!("after it had {passed}"))),
        }
    }
}
