from mukron.cli import app

app()
