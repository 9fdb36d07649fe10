//! Compares the number of ranks with the one that the program has set.

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_hal::ErrorKind;

use crate::Error;

/// The reason of a group of one rank, as [`Group::selection`](crate::Group::selection) prints it.
pub(super) const NO_LAUNCHER: &str = "one rank: no launcher's variables are set";

/// Checks the number of ranks of the launcher before the ranks connect.
pub(super) fn check_launched_ranks(
    expected: Option<usize>,
    environment: Option<&Environment>,
) -> Result<(), Error> {
    let found = environment.map_or(1, |environment| environment.ranks);
    let Some(expected) = expected.filter(|&expected| expected != found) else {
        return Ok(());
    };

    let text = match environment.and_then(|environment| environment.ranks_variable) {
        Some(variable) => format!(
            "{variable} is {found}, expected {expected}, the number of ranks that the program has set"
        ),
        None => format!(
            "the group has 1 rank, because no launcher's variables are set, expected {expected} ranks, the number that the \
             program has set; start the ranks with a launcher that passes its variables on, or set RANK and WORLD_SIZE"
        ),
    };
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Checks the number of ranks that a bootstrap of the caller connects.
pub(super) fn check_connected_ranks(expected: Option<usize>, found: usize) -> Result<(), Error> {
    let Some(expected) = expected.filter(|&expected| expected != found) else {
        return Ok(());
    };

    let ranks = if found == 1 { "rank" } else { "ranks" };
    let text = format!(
        "the bootstrap connects {found} {ranks}, expected {expected}, the number that the program has set"
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

#[cfg(test)]
mod tests {
    use peerlane_collectives::bootstrap::in_process;

    use super::*;
    use crate::OpenOptions;

    #[test]
    fn another_number_of_ranks_than_expected_names_the_variable() {
        let environment = |variables: &[(&str, &str)]| {
            let found = |name: &str| variables.iter().find(|(key, _)| *key == name);
            let lookup = |name: &str| found(name).map(|(_, value)| (*value).to_owned());
            Environment::from_lookup(lookup).unwrap()
        };
        let text = |expected, environment: Option<&Environment>| {
            let error = check_launched_ranks(Some(expected), environment).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };

        let slurm = environment(&[
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "3"),
            ("SLURM_STEP_NODELIST", "node0"),
        ]);
        assert_eq!(
            text(4, slurm.as_ref()),
            "SLURM_STEP_NUM_TASKS is 3, expected 4, the number of ranks that the program has set"
        );
        assert_eq!(
            text(4, None),
            "the group has 1 rank, because no launcher's variables are set, expected 4 ranks, the number that the program has \
             set; start the ranks with a launcher that passes its variables on, or set RANK and WORLD_SIZE"
        );
        check_launched_ranks(Some(3), slurm.as_ref()).unwrap();
        check_launched_ranks(Some(1), None).unwrap();
        check_launched_ranks(None, slurm.as_ref()).unwrap();

        let error = in_process::run(1, |bootstrap| {
            OpenOptions::default().ranks(2).open(bootstrap).map(drop)
        });
        let text = "the bootstrap connects 1 rank, expected 2, the number that the program has set";
        assert_eq!(error.unwrap_err().to_string(), text);
    }
}
