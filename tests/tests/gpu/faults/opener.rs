//! Opens a fabric in a process where an obstacle exists.

use peerlane_tests::processes::Child;
use peerlane_tests::{Failure, GpuDriver, Outcome};

use super::processes::{Player, finish, patience, says};

/// One that opens a device.
pub(crate) fn opener(driver: GpuDriver, device: u32) -> Outcome<Player> {
    Ok(Player::new(driver, "open")?.value("DEVICE", device))
}

/// It is refused in these words.
pub(crate) fn refused(player: Player, begins: &str, holds: &[&str]) -> Outcome {
    let mut child = player.start()?;
    let text = child.read_line(patience())?;
    says("the process", &text, begins, holds)?;
    let_go(child)
}

/// It keeps its device until then.
pub(crate) fn let_go(mut child: Child) -> Outcome {
    child.send_line("enough")?;
    finish(vec![child])
}

/// A file of the library's name that is none stands for a library that is missing, which would be
/// looked for further on.
pub(crate) fn no_library(driver: GpuDriver, file: &str, begins: &str, holds: &[&str]) -> Outcome {
    let folder = std::env::temp_dir().join(format!("peerlane-no-driver-{}", std::process::id()));
    let made = std::fs::create_dir_all(&folder);
    made.and_then(|()| std::fs::write(folder.join(file), b""))
        .map_err(|error| Failure::new(format!("{folder:?}: {error}")))?;
    let player = opener(driver, 0)?.driver_from(&folder);
    let outcome = refused(player, begins, holds);
    let _ = std::fs::remove_dir_all(&folder);
    outcome
}
