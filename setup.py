# SPDX-License-Identifier: Apache-2.0
"""`pip install .`: everything it says is in pyproject.toml."""

import setuptools


def with_older_license(load_file):
    """`setuptools.config.pyprojecttoml.load_file`, with the license as setuptools before 77 has it."""

    def load(path):
        content = load_file(path)
        project, tool = content["project"], content["tool"]["setuptools"]
        project["license"] = dict(text=project["license"])
        tool["license-files"] = project.pop("license-files")
        return content

    return load


if int(setuptools.__version__.partition(".")[0]) < 77:
    from setuptools.config import pyprojecttoml

    pyprojecttoml.load_file = with_older_license(pyprojecttoml.load_file)

setuptools.setup()
